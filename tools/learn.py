"""Train a model on a lesson, and draw its curve: `make learn LESSON=name`.

A lesson of tools/lessons has a tiny model. After the warm-up, train.py starts datapipe, worker,
server and trainer on this machine. A lesson of arealite/ext/demo/lessons has SmolLM2, and
`arealite quickstart` runs it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from arealite.base.trial_files import RunPaths  # noqa: E402
from arealite.ext.demo import quickstart  # noqa: E402
from arealite.ext.demo.lesson import names_of_lessons  # noqa: E402
from tools.demo import BACKENDS, SERVER_WAIT_S, plot, server  # noqa: E402
from tools.lesson import Lesson, make_kit  # noqa: E402

OUT = Path("runs/learn")
ENDS = 5
"""Number of first and of last steps whose means are printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one lesson; return the exit code of train.py."""
    of_tiny_models = sorted(file.stem for file in (ROOT / "tools/lessons").glob("[a-z]*.py"))
    names = [*of_tiny_models, *names_of_lessons()]
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("lesson", choices=names)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--backend", choices=["embedded", "sglang"], default="embedded", help="the server"
    )
    parser.add_argument("--kit", type=Path, help="only create the model, in this folder")
    parser.add_argument(
        "--curve", type=Path, help="file of the curve; default: curve.png in the run's folder"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="further options of train.py"
    )
    options = parser.parse_intermixed_args(argv)
    if options.lesson not in of_tiny_models:
        if options.backend != "embedded" or options.kit or options.curve:
            parser.error("--backend, --kit and --curve are for the lessons of tiny models")
        words = ["--model", "smollm2", "--lesson", options.lesson, "--seed", str(options.seed)]
        return quickstart.main([*words, *options.overrides])
    lesson: Lesson = importlib.import_module(f"tools.lessons.{options.lesson}").LESSON
    if options.kit:
        print(make_kit(options.kit, lesson, options.seed))
        return 0
    os.chdir(ROOT)
    begin, trial = time.perf_counter(), f"{options.lesson}-seed{options.seed}"
    trial += f"-{options.backend}" * (options.backend != "embedded")
    model = make_kit(OUT / f"kit-{trial}", lesson, options.seed)
    paths = RunPaths((OUT / trial).absolute())
    shutil.rmtree(paths.root, ignore_errors=True)
    overrides = [*lesson.overrides, *options.overrides]
    code = train(model, trial, options.seed, options.backend, overrides)
    if code != 0:
        print(f"training ended with code {code}; logs are in {paths.logs}")
        return code
    seconds = time.perf_counter() - begin
    report(lesson, paths, seconds, options.curve or paths.root / "curve.png")
    return 0


def train(model: Path, trial: str, seed: int, backend: str, overrides: Sequence[str]) -> int:
    """Run train.py with a server of its own."""
    names = [f"model.path={model}", "experiment_name=learn", f"trial_name={trial}", f"seed={seed}"]
    words, serving = ["launcher.llm_servers=1"], nullcontext()
    if backend != "embedded":
        words = [f"server_wait_s={SERVER_WAIT_S['sglang']}"]
        serving = server([*names, *BACKENDS[backend]], log=OUT / f"{trial}-server.log")
    words.append("trainer.ppo.checkpoint.every_steps=0")
    command = [sys.executable, "train.py", *names, *words, *overrides]
    print(f"training: {' '.join(['python3', *command[1:]])}", flush=True)
    with serving:
        return subprocess.run(command, check=False).returncode


def report(lesson: Lesson, paths: RunPaths, seconds: float, curve: Path) -> None:
    """Print and draw the metrics of the lesson; write summary.json."""
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    summary: dict[str, Any] = {"about": lesson.about, "seconds": round(seconds, 1)}
    for name in lesson.curves:
        values = [line[name] for line in lines if name in line]
        if values:
            ends = min(ENDS, max(1, len(values) // 2))
            summary[name] = [round(fmean(values[:ends]), 4), round(fmean(values[-ends:]), 4)]
            print(f"{name}: {summary[name][0]} -> {summary[name][1]}")
    (paths.root / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    rewards = [line[lesson.curves[0]] for line in lines if lesson.curves[0] in line]
    print(plot(rewards))
    draw(lesson, lines, curve)
    print(f"total time: {seconds:.0f} s; curve: {curve}")


def draw(lesson: Lesson, lines: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the lesson's curves over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name in lesson.curves:
        points = [(line["step"], line[name]) for line in lines if name in line]
        style = "o" if name.startswith("eval/") else "-"
        axes.plot(*zip(*points, strict=True), style, label=name) if points else None
    axes.set(xlabel="step", title=lesson.about)
    axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
