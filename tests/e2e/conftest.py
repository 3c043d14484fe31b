"""A real server process and a `train` command for end-to-end tests; no process outlives a test."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.view.metric_names import describe
from tests.models import tiny_model
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SLOW_S = 400.0
"""Time limit for work of 15 s on an idle machine; see tests/waiting.py."""
START_S = 1200.0
"""Time limit of a server's start: a vLLM takes 40 s on an idle machine."""
LEARNING = [
    "trainer.ppo.collector.env.math.reward.type=function",
    "trainer.ppo.collector.env.math.reward.function.paths="
    f"[{Path(__file__).with_name('alternating.py')}:alternating]",
    "trainer.ppo.lr=1e-4",
    "trainer.ppo.optimizer.warmup_steps=0",
]
"""Options with which each step changes the weights of a random model, whose answers are wrong."""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def write_rows(file: Path, count: int, *, seed: int) -> None:
    """Write sums of digits as JSONL rows."""
    draw = random.Random(seed)
    with file.open("w") as output:
        for _ in range(count):
            a, b = draw.randint(1, 9), draw.randint(1, 9)
            row = {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "extra_info": {"a": a}}
            output.write(json.dumps(row) + "\n")


@dataclass
class Site:
    """A folder with a model, a dataset and a live server, and the commands a user would type."""

    folder: Path
    model: Path
    server: subprocess.Popen[bytes]

    def command(self, run_root: Path, *overrides: str) -> list[str]:
        return [
            sys.executable,
            str(ROOT / "train.py"),
            *self.names(),
            f"model.path={self.model}",
            f"dataset.train={self.folder / 'train.jsonl'}",
            f"dataset.eval={self.folder / 'eval.jsonl'}",
            f"cluster.run_root={run_root}",
            "trainer.ppo.batch_size=16",
            "trainer.ppo.collector.group_size=4",
            "trainer.ppo.collector.concurrency=32",
            "trainer.ppo.collector.sampling.max_new_tokens=6",
            "trainer.ppo.eval.sampling.max_new_tokens=6",
            "trainer.ppo.total_steps=4",
            f"launcher.drain_timeout_s={SLOW_S}",
            f"server_wait_s={SLOW_S}",
            *overrides,
        ]

    def names(self) -> list[str]:
        return [
            "experiment_name=e2e",
            "trial_name=t",
            f"cluster.name_root={self.folder / 'names'}",
        ]

    def train(self, run_root: Path, *overrides: str, **options: Any) -> Finished:
        """Run train.py to its end, from the run's own folder."""
        run_root.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            self.command(run_root, *overrides),
            cwd=run_root,
            capture_output=True,
            text=True,
            timeout=SLOW_S,
            env=ENVIRONMENT | options.get("env", {}),
        )
        all_gone(run_root)
        return Finished(
            done.returncode, done.stdout + done.stderr, RunPaths(run_root / "e2e" / "t")
        )


@dataclass
class Finished:
    """Exit code and output of a run of train.py, and its folder."""

    code: int
    shown: str
    paths: RunPaths

    def metrics(self) -> list[dict[str, float]]:
        lines = [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]
        written = {name for line in lines for name in line} - {"step", "time"}
        assert not [name for name in written if describe(name) is None], "all are documented"
        return lines

    def logs(self) -> str:
        return "\n".join(f"== {f.name}\n{f.read_text()}" for f in self.paths.logs.glob("*.log"))


def strays(run_root: Path) -> list[list[str]]:
    """List the processes whose command line names this run folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if any(str(run_root) in word for word in line):
            found.append(line)
    return found


def all_gone(run_root: Path) -> None:
    """Check that no process of a run remains; a process killed with its parent may need time."""
    until(lambda: not strays(run_root), what=lambda: f"the end of {strays(run_root)}")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Start one embedded server for all end-to-end tests."""
    with serving(tmp_path_factory.mktemp("site")) as made:
        yield made


@contextmanager
def serving(folder: Path, *options: str, **model_fields: int) -> Iterator[Site]:
    """Run a server in a new site; stop it, and check that it exited.

    Args:
        folder: The folder of the site.
        options: Options of launch_llm_server.
        model_fields: Fields of the model's config.
    """
    model = tiny_model(folder / "model", **model_fields)
    write_rows(folder / "train.jsonl", 64, seed=1)
    write_rows(folder / "eval.jsonl", 8, seed=2)
    log = folder / "server.log"
    registered = lambda: list((folder / "names").rglob("llm_server/*.json"))  # noqa: E731
    with launched(folder, model, *options, log=log) as server:
        is_over = lambda: registered() or server.poll() is not None  # noqa: E731
        until(is_over, what="the server", seconds=START_S)
        assert server.poll() is None, log.read_text()
        yield Site(folder, model, server)
        assert server.poll() is None, "the server died: " + log.read_text()
    assert not registered(), "the server left its name behind"


@contextmanager
def launched(
    folder: Path, model: Path, *options: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run launch_llm_server in a site's folder; stop it, and check that it exits as it should."""
    names = ["experiment_name=e2e", "trial_name=t", f"cluster.name_root={folder / 'names'}"]
    script = ROOT / "arealite" / "launch_llm_server.py"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, str(script), *names, f"model.path={model}", *options],
            cwd=folder,
            stdout=output,
            stderr=output,
            env=ENVIRONMENT,
        )
    try:
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(SLOW_S) == 0, log.read_text()
