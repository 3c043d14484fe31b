"""Run an example as a user does, in a folder that has its tiny model already, with a shorter
warm-up, once per session. No process remains."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from transformers.utils import logging

from arealite.base.trial_files import RunPaths
from arealite.ext.demo import sorting
from arealite.ext.demo.tiny_model import make_tiny_model
from tests.e2e.conftest import ENVIRONMENT, ROOT, Finished, all_gone
from tools import lesson

EXAMPLES = ROOT / "examples"
LIMIT_S = 600.0
"""Time limit for work of 15 s on an idle machine; see tests/waiting.py."""
STEPS = {"calculator": 200, "foreign_agent": 200}
"""Warm-up steps, by default 60: enough for some right answers, which learning needs."""
Example = Callable[..., Finished]


def make_kit(folder: Path, name: str) -> None:
    """Create the kit of examples/_run.py in a few seconds."""
    logging.disable_progress_bar()
    if name != "sorting":
        found = import_module(f"tools.lessons.{name}").LESSON
        steps = min(STEPS.get(name, 60), found.max_steps)
        lesson.make_kit(folder, dataclasses.replace(found, max_steps=steps), 1)
    elif not (folder / "done").exists():
        sorting.write_data(folder, 1)
        make_tiny_model(folder / "model", sorting.SHAPE)
        sorting.warm_up(folder / "model", 1, accuracy=0.15)
        (folder / "done").touch()


@pytest.fixture
def kit(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a kit; the first process creates it."""
    base = tmp_path_factory.getbasetemp()
    kits = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kits"

    def get(name: str) -> Path:
        kits.mkdir(exist_ok=True)
        with (kits / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            make_kit(kits / name, name)
        return kits / name

    return get


@pytest.fixture
def example(kit: Callable[[str], Path], tmp_path: Path) -> Example:
    """Return a function that runs an example on its kit for a few small steps."""

    def run(name: str, *words: str, of: str = "sorting") -> Finished:
        there = tmp_path / "runs/examples/kits"
        there.mkdir(parents=True, exist_ok=True)
        if not (there / of).exists():
            (there / of).symlink_to(kit(of))
        small = ["trainer.ppo.total_steps=2", "trainer.ppo.batch_size=64", "server_wait_s=300"]
        small += ["trainer.ppo.eval.num_prompts=16", "trainer.offline.max_steps=12"]
        own = [f"cluster.name_root={tmp_path / 'names'}", "logger.types=[]", *small]
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py"), *own, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=ENVIRONMENT,
        )
        all_gone(tmp_path)
        paths = RunPaths(tmp_path / "runs/examples" / f"{name}-laptop")
        return Finished(done.returncode, done.stdout + done.stderr, paths)

    return run
