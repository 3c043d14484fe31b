"""Measure the cost of `arealite top`: its CPU time, and the step time of the run beside it.

`top` of a small run is stopped and continued alternately. Prints the medians, and writes
out/bench/top.json.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
AHEAD, PAIRS, TURN_S = 5, 15, 10.0
"""Steps before the comparison; number of pairs without and with `top`, and seconds of each part."""
SMALL = ("batch_size=64", "updates=1", "total_steps=100000")


def main() -> None:
    """Run, compare, and print."""
    with tempfile.TemporaryDirectory() as name:
        kit = Path(name) / "kit"
        subprocess.run([sys.executable, "tools/demo_task.py", kit], cwd=ROOT, check=True)
        words = [f"model.path={kit}/model", f"dataset.train={kit}/train.jsonl", "trial_name=bench"]
        words += [f"cluster.run_root={name}", f"cluster.name_root={name}/names", "server_wait_s=99"]
        words += ["launcher.llm_servers=1", *(f"trainer.ppo.{each}" for each in SMALL)]
        command = [sys.executable, "train.py", "--config", "config/demo.yaml", *words]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as run:
            try:
                figures = compare(Path(name) / "demo" / "bench")
            finally:
                run.send_signal(signal.SIGINT)
    print(f"start: {figures['start_cpu_s']:.2f} s of one processor")
    print(f"then, of all processors: {figures['cpu_share']:.2%}  (goal: < 1 %)")
    print(f"step time with / without, median of {PAIRS} pairs: {figures['ratio']:.3f}")
    out = ROOT / "out" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    (out / "top.json").write_text(json.dumps(figures, indent=2) + "\n")


def compare(folder: Path) -> dict:
    """Return the CPU time of a `top` of the run in `folder`, and the step times beside it."""
    while len(step_times(folder)) < AHEAD:
        time.sleep(0.2)
    mine, its = pty.openpty()
    threading.Thread(target=lambda: [*iter(lambda: os.read(mine, 65536), b"")], daemon=True).start()
    # A session with its own terminal: without one, `top` draws no panel.
    top = f'exec "{sys.executable}" -m arealite.cli.main top "{folder}" <"$0" >"$0"'
    shell, environment = ["sh", "-c", top, os.ttyname(its)], {**os.environ, "TERM": "xterm"}
    process = psutil.Popen(shell, cwd=ROOT, start_new_session=True, env=environment)
    time.sleep(TURN_S)
    begin, turns = sum(process.cpu_times()[:2]), []
    for turn in range(2 * PAIRS):
        process.send_signal(signal.SIGCONT if turn % 2 else signal.SIGSTOP)
        start = time.time()
        time.sleep(TURN_S)
        turns.append((start, time.time()))
    used = sum(process.cpu_times()[:2]) - begin
    process.kill()
    steps = step_times(folder)
    means = [statistics.fmean(s for at, s in steps if a <= at - s and at <= b) for a, b in turns]
    ratios = [beside / alone for alone, beside in zip(means[::2], means[1::2], strict=True)]
    share, ratio = used / (PAIRS * TURN_S * (os.cpu_count() or 1)), statistics.median(ratios)
    return {"start_cpu_s": begin, "cpu_share": share, "ratio": ratio, "ratios": ratios}


def step_times(folder: Path) -> list[tuple[float, float]]:
    """Return the end time and the duration of each step."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()[:-1] if file.exists() else []
    steps = [line for line in map(json.loads, lines) if "time/step_s" in line]
    return [(line["time"], line["time/step_s"]) for line in steps]


if __name__ == "__main__":
    main()
