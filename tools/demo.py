"""`make demo`: server, training and audit of a tiny run on this machine, in minutes.

The script runs the commands that a user would type, and reads the files of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from arealite.base.trial_files import RunPaths  # noqa: E402
from arealite.ext.demo.sorting import SHAPE, make_kit  # noqa: E402

OUT = Path("runs/demo")
SERVER_GRACE_S = 10.0
PLOT_HEIGHT = 8
VERSIONS = "publish/version", "eval/newest_version"
"""Metrics that contain the servers' version; after n updates it is n."""
SGLANG_PYTHON = ".venv-sglang/bin/python"
VLLM_PYTHON = ".venv-vllm/bin/python"
BACKENDS = {
    "embedded": [],
    "sglang": [
        "llm_server.type=sglang",
        "llm_server.sglang.device=cpu",
        f"llm_server.sglang.python={os.environ.get('SGLANG_PYTHON', SGLANG_PYTHON)}",
    ],
    "vllm": [
        "llm_server.type=vllm",
        "llm_server.vllm.device=cpu",
        "llm_server.vllm.kv_cache_gb=1",
        f"llm_server.vllm.python={os.environ.get('VLLM_PYTHON', VLLM_PYTHON)}",
    ],
}
"""Options of launch_llm_server for each backend; training is the same with each."""
SHARED = "shared"
"""The backend without a server: the trainer's process generates from the parameters it trains."""
SERVER_WAIT_S = {"sglang": 120, "vllm": 300}
"""SGLang takes 20 s to start, vLLM 40 s; on a loaded machine a minute and three."""
KIT_HEADS = {"vllm": 2}
"""Attention heads of the model, if they differ: vLLM has no heads of 16 numbers on a CPU."""
BLOCKS = " ▁▂▃▄▅▆▇█"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo once; return the trainer's exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="batches to train; default: config/demo.yaml's")
    parser.add_argument(
        "--backend", choices=[*BACKENDS, SHARED], default="embedded", help="the server"
    )
    parser.add_argument(
        "--heads", type=int, help="attention heads of the model; default: 4, and 2 for vllm"
    )
    parser.add_argument("--keep", action="store_true", help="move an earlier run aside")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace) -> int:
    """Make model and data, train with real processes, and print the results."""
    OUT.mkdir(parents=True, exist_ok=True)
    trial = f"seed{options.seed}" + (f"-{options.backend}" * (options.backend != "embedded"))
    paths = RunPaths((OUT / trial).absolute())
    with (OUT / f"{trial}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"a demo with seed {options.seed} is running in {paths.root}; take another --seed"
            )
            return 2
        return run_locked(paths, options)


def run_locked(paths: RunPaths, options: argparse.Namespace) -> int:
    """Run the demo while no other run uses this folder and these names."""
    begin, trial = time.perf_counter(), paths.root.name
    heads = options.heads or KIT_HEADS.get(options.backend, SHAPE.heads)
    kit = OUT / (f"kit-seed{options.seed}" + f"-heads{heads}" * (heads != SHAPE.heads))
    print(f"model and data: {kit}; the model is taught until 30 % of its answers are right")
    make_kit(kit, options.seed, heads=heads)
    clear(paths.root, keep=options.keep)
    names = ["experiment_name=demo", f"trial_name={trial}", f"seed={options.seed}"]
    overrides = [f"model.path={kit / 'model'}", *names]
    if options.backend == SHARED:
        serving = contextlib.nullcontext()
        overrides.append("trainer.ppo.publisher.type=shared")
    else:
        serving = server([*overrides, *BACKENDS[options.backend]], log=OUT / f"{trial}-server.log")
    with serving:
        if options.backend in SERVER_WAIT_S:
            overrides.append(f"server_wait_s={SERVER_WAIT_S[options.backend]}")
        code = train(kit, overrides, options.steps)
    if code != 0:
        print(f"training ended with code {code}; logs are in {paths.logs}")
        return code
    more = {"seed": options.seed, "backend": options.backend}
    report(paths, more | {"seconds": round(time.perf_counter() - begin, 1)})
    return 0


def clear(root: Path, *, keep: bool) -> None:
    """Remove an earlier run's folder, or move it aside; print which."""
    if not root.exists():
        return
    if keep:
        aside = root.with_name(f"{root.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        root.rename(aside)
        print(f"earlier run: moved to {aside}")
    else:
        shutil.rmtree(root)
        print(f"earlier run: removed {root} (--keep would move it aside)")


@contextlib.contextmanager
def server(overrides: Sequence[str], *, log: Path) -> Iterator[None]:
    """Run a language-model server in its own process group; end the group in every case."""
    command = [sys.executable, "arealite/launch_llm_server.py", *overrides]
    print(f"server: {' '.join(['python3', *command[1:]])}\n        log: {log}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        if process.poll() not in (None, 0):
            tail = log.read_text(errors="replace").splitlines()[-10:]
            print("the server exited unexpectedly:", *tail, sep="\n    ")
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the group, then SIGKILL."""
    for number, grace_s in ((signal.SIGTERM, SERVER_GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


def train(kit: Path, overrides: Sequence[str], steps: int | None) -> int:
    """Run train.py in this terminal; forward each Ctrl-C, and wait until it has stopped."""
    command = [sys.executable, "train.py", "--config", "config/demo.yaml", *overrides]
    command += [f"dataset.train={kit / 'train.jsonl'}", f"dataset.eval={kit / 'eval.jsonl'}"]
    if steps is not None:
        command.append(f"trainer.ppo.total_steps={steps}")
    print(f"training: {' '.join(['python3', *command[1:]])}", flush=True)
    # In the terminal's process group it would receive each Ctrl-C twice, and stop at once.
    process = subprocess.Popen(command, process_group=0)
    while True:
        try:
            # A wait without a timeout would miss a Ctrl-C just before its system call.
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)


def report(paths: RunPaths, more: dict[str, Any]) -> None:
    """Print curve, held-out reward and paths, below train.py's audit; write summary.json."""
    from arealite.ext.audit.audit import audit

    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    audited = audit(paths.ledger)
    summary = summarize(lines, audited) | more
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    (OUT / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (paths.root / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("\nmean reward of each step's batch:")
    print(plot(rewards))
    print(f"\nheld-out reward: {summary['reward_before']} -> {summary['reward_after']}\n")
    print(f"summary  {OUT / 'summary.json'}\nmetrics  {paths.metrics}\nledger   {paths.ledger}")
    print(f"model    {paths.export}\ncurve    {draw(paths.root / 'reward.png', lines)}")
    print(f"next     {Path(sys.executable).parent}/arealite report {paths.root}")


def summarize(lines: Sequence[dict[str, Any]], audited: Any) -> dict[str, Any]:
    """Return a summary of the metrics and the audit."""
    steps = [line for line in lines if "reward/mean" in line]
    evals = [line["eval/reward"] for line in lines if "eval/reward" in line]
    versions = [line[key] for line in lines for key in VERSIONS if key in line]
    seconds = steps[-1]["time"] - steps[0]["time"] + steps[0].get("time/step_s", 0.0)
    tokens = sum(s["length/trained_mean"] * s["episode/trajectories"] for s in steps)
    return {
        "reward_before": round(evals[0], 4) if evals else None,
        "reward_after": round(evals[-1], 4) if len(evals) > 1 else None,
        "weight_updates": int(max(versions, default=0)),
        "mixed_version_trajectories": audited.mixed_version_trajectories,
        "interrupted_generations": audited.interrupted,
        "lost": len(audited.lost),
        "repeated": len(audited.repeated),
        "rl_seconds": round(seconds, 2),
        "trained_tokens_per_s": round(tokens / seconds, 1),
    }


def plot(values: Sequence[float], *, height: int = PLOT_HEIGHT) -> str:
    """Draw values in [0, 1] as columns of block characters, one per value, with a scale."""
    rows = []
    for row in reversed(range(height)):
        fills = [min(max(value * height - row, 0.0), 1.0) for value in values]
        scale = f"{(row + 1) / height:4.2f}" if row % 2 else "    "
        rows.append(f"{scale} │{''.join(BLOCKS[round(f * (len(BLOCKS) - 1))] for f in fills)}")
    rows.append(f"     └{'─' * len(values)} {len(values)} steps")
    return "\n".join(rows)


def draw(file: Path, lines: Sequence[dict[str, Any]]) -> str:
    """Write the curve as a picture; return its path, or the reason why there is none."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no picture: matplotlib is not installed (pip install -e '.[demo]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, style in (("reward/mean", "-"), ("eval/reward", "o")):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axes.plot(*zip(*points, strict=True), style, label=name) if points else None
    axes.set(xlabel="step", ylim=(0, 1), title="sorting six digits")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return str(file)


if __name__ == "__main__":
    sys.exit(main())
