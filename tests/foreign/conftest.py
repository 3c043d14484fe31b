"""Runs of other people's code: their package, and a checkout that is not installed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Finished, all_gone
from tests.models import tiny_model


@dataclass
class Place:
    """A folder of runs, and the program that the user calls there."""

    folder: Path
    program: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        path = self.folder / "model"
        return str(path if path.exists() else tiny_model(path))

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.program, *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=SLOW_S,
            env=ENVIRONMENT | self.environment | {"COLUMNS": "500"},
        )

    def run_options(self, *options: str) -> list[str]:
        """Return the options of a small run with a server of its own."""
        return [
            "experiment_name=foreign",
            "trial_name=t",
            f"cluster.run_root={self.folder}",
            f"cluster.name_root={self.folder / 'names'}",
            f"model.path={self.model}",
            "dataset.train=generated",
            "dataset.rows=8",
            "launcher.llm_servers=1",
            f"launcher.drain_timeout_s={SLOW_S}",
            f"server_wait_s={SLOW_S}",
            "trainer.ppo.batch_size=8",
            "trainer.ppo.collector.group_size=4",
            "trainer.ppo.collector.concurrency=8",
            "trainer.ppo.collector.sampling.max_new_tokens=6",
            *options,
        ]

    def train(self, *options: str) -> Finished:
        done = self.call("train", *self.run_options(*options))
        all_gone(self.folder)
        paths = RunPaths(self.folder / "foreign" / "t")
        return Finished(done.returncode, done.stdout + done.stderr, paths)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")
