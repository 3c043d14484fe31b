"""Measure start times: `arealite --help`, a datapipe process, a run, and its killed roles.

A run is a `quickstart` whose kit exists. Each role is killed several times. It is ready at the
datapipe's first answer (a worker), its first answer (a server), its name (the datapipe) or its
first batch (a trainer). Runs are measured with and without a warm parent. Prints medians, and
writes out/bench/start.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from arealite.api.experiment_config import ExperimentConfig, name_dir  # noqa: E402
from arealite.base import config_tree  # noqa: E402
from arealite.base.trial_files import RunPaths  # noqa: E402
from arealite.cli import configs  # noqa: E402
from arealite.ext.warm_start.starts import SWITCH  # noqa: E402
from arealite.system.names.name_registry import NameRegistry  # noqa: E402
from tools import figures, ready_marks  # noqa: E402

REPEATS = 7
MODES = {"warm": "1", "cold": "0"}
"""Values of SWITCH: with and without a warm parent."""
LIMIT_S = 300.0
GOALS = {"rollout": 1.0, "llm_server": 1.0}


def main() -> None:
    """Measure all and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, help="kills of each role")
    parser.add_argument("--modes", nargs="*", default=[*MODES], choices=MODES)
    options = parser.parse_args()
    found = {"help_s": median(help_s), "datapipe_ready_s": median(datapipe_ready_s)}
    print(f"arealite --help      {found['help_s']:.3f} s  (goal: < 0.5)")
    print(f"datapipe ready       {found['datapipe_ready_s']:.3f} s  (goal: < 1)", flush=True)
    for mode in options.modes:
        with tempfile.TemporaryDirectory() as name:
            found |= {
                f"{mode}_{key}": value
                for key, value in run_figures(Path(name), mode, options.kills).items()
            }
    mode = options.modes[0]
    keys = [key.removeprefix(f"{mode}_") for key in found if key.startswith(f"{mode}_")]
    print(f"{'':<28}" + "".join(f"{mode:>10}" for mode in options.modes) + "   goal")
    for key in keys:
        values = "".join(f"{found[f'{mode}_{key}']:>10.2f}" for mode in options.modes)
        goal = GOALS.get(key.removesuffix("_ready_s"))
        print(f"{key:<28}{values}" + (f"   <= {goal:g}" if goal else ""))
    figures.save("start.json", found)


def run_figures(folder: Path, mode: str, kills: int) -> dict[str, float]:
    """Measure one run: its first step, its memory, and the time from a kill to readiness."""
    marks = folder / "marks"
    marks.mkdir()
    quickstart = [sys.executable, "-m", "arealite.cli.main", "quickstart"]
    subprocess.run([*quickstart, "--kit", "kit"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    environment = os.environ | {SWITCH: MODES[mode], "READY_MARKS": str(marks)}
    (folder / "runs/demo").mkdir(parents=True)
    (folder / "kit").rename(folder / "runs/demo/kit-seed1")
    plugin = f"imports=[{ready_marks.__file__}]"
    words = [*quickstart, "trainer.ppo.total_steps=100000", "launcher.max_restarts=100", plugin]
    found = dict[str, float]()
    with (folder / "output").open("wb") as output:
        begin = time.perf_counter()
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        run = Run(process, folder, marks)
        run.until(lambda: run.steps() > 0, "the first step")
        found["first_step_s"] = time.perf_counter() - begin
        found["cpu_to_first_step_s"] = run.cpu_s()
        run.until(lambda: run.steps() > 1, "the second step")
        found["pss_mb"] = run.pss_mb()
        for role in ("rollout", "llm_server", "datapipe", "trainer"):
            times, cpu_times = zip(*(run.ready_s(role) for _ in range(kills)), strict=True)
            found[f"{role}_ready_s"] = statistics.median(times)
            found[f"{role}_ready_cpu_s"] = statistics.median(cpu_times)
            print(f"{mode} {role}: {' '.join(f'{seconds:.2f}' for seconds in times)}", flush=True)
        return found
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


class Run:
    """A running quickstart."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, marks: Path) -> None:
        self.process = process
        self.marks = marks
        self.paths = RunPaths(folder / "runs/demo/quickstart")
        self.until(self.paths.config.exists, "the run's config")
        config = configs.load(ExperimentConfig, self.paths.config, [])
        self.vitals = name_dir(config) / "vitals"
        self.names = NameRegistry.of(config)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition is true."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                output = (self.paths.root.parents[2] / "output").read_text()
                raise SystemExit(f"error: no {what}:\n{output[-3000:]}")
            time.sleep(0.005)

    def steps(self) -> int:
        """Return the number of trained steps."""
        with contextlib.suppress(OSError):
            return self.paths.metrics.read_text().count('"reward/mean"')
        return 0

    def processes(self) -> Iterator[psutil.Process]:
        """Yield the run's processes."""
        launcher = psutil.Process(self.process.pid)
        yield from (launcher, *launcher.children(recursive=True))

    def cpu_s(self) -> float:
        """Return the CPU seconds of the run's processes, and of those that have exited."""
        return sum(sum(process.cpu_times()[:4]) for process in self.processes())

    def pss_mb(self) -> float:
        """Return the memory of the run's processes; a shared page counts once."""
        return sum(process.memory_full_info().pss for process in self.processes()) / 2**20

    def pid(self, role: str) -> int:
        """Return the process id of a role, 0 if it is not up. A server's parent is no server."""
        for file in self.vitals.glob(f"{role}-*.json"):
            if file.stem != "llm_server-0":
                with contextlib.suppress(OSError, ValueError):
                    return int(json.loads(file.read_text())["pid"])
        return 0

    def ready_s(self, role: str) -> tuple[float, float]:
        """Kill a role; return the seconds until its successor is ready, and its CPU seconds."""
        steps = self.steps()
        self.until(lambda: self.steps() > steps and self.pid(role), f"step, and {role}")
        pid = self.pid(role)
        for file in self.marks.iterdir():
            file.unlink()
        begin = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        others = {pid, *(self.pid(other) for other in ("rollout", "trainer") if other != role)}
        successors = list[int]()

        def is_ready() -> bool:
            if role in ("rollout", "trainer"):
                successors[:] = {int(file.name) for file in self.marks.iterdir()} - others
            elif role == "llm_server":
                successors[:] = self.answering(pid)
            else:
                entries = self.names.list(role)
                successors[:] = [e.value["pid"] for e in entries if e.value["pid"] != pid]
            return bool(successors)

        self.until(is_ready, role)
        seconds = time.perf_counter() - begin
        return seconds, sum(psutil.Process(successors[0]).cpu_times()[:2])

    def answering(self, dead: int) -> list[int]:
        """Return the process id of a dead server's successor, once it generates a token."""
        for entry in self.names.list("llm_server"):
            if entry.value["pid"] != dead:
                body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
                headers = {"Content-Type": "application/json"} | self.names.headers("embedded")
                address = f"{entry.value['address']}/generate"
                request = urllib.request.Request(address, json.dumps(body).encode(), headers)
                with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60):
                    return [entry.value["pid"]]
        return []


def median(measure) -> float:
    """Return the median of several runs of `measure`."""
    return statistics.median(measure() for _ in range(REPEATS))


def help_s() -> float:
    """Time `arealite --help` as a whole process."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "arealite.cli.main", "--help"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def datapipe_ready_s() -> float:
    """Time a datapipe process with 10,000 tasks from its start to its name in the registry."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = "".join(
            json.dumps({"prompt": f"{i}+1=", "ground_truth": str(i + 1)}) + "\n"
            for i in range(10000)
        )
        (folder / "train.jsonl").write_text(rows)
        options = [
            f"cluster.name_root={folder}/names",
            f"cluster.run_root={folder}/runs",
            f"dataset.train={folder}/train.jsonl",
        ]
        config = configs.load(ExperimentConfig, [], options)
        config_tree.write(config, RunPaths(folder).resolved)
        (folder / "runs" / "arealite" / "trial").mkdir(parents=True)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "arealite.cli.main", "role", "datapipe", "0", name]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            while not list(folder.rglob("names/**/datapipe/*.json")):
                assert process.poll() is None, "the datapipe died"
                time.sleep(0.002)
            seconds = time.perf_counter() - begin
            process.kill()
        return seconds


if __name__ == "__main__":
    main()
