"""A live Slurm for the tests of this folder, and commands of a user."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import AuditReport, audit
from tests.clusters.slurm import Slurm, missing, real_slurm
from tests.e2e.conftest import ENVIRONMENT, write_rows
from tests.models import tiny_model
from tests.waiting import until

SLOW_S = 240.0
"""Time limit for work of 20 s on an idle machine; see tests/waiting.py."""
ENDED = "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"


@dataclass
class Site:
    """A trial in a separate folder, on a cluster."""

    slurm: Slurm
    folder: Path
    inputs: Path

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.folder / "runs" / "e2e" / "t")

    def arealite(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "arealite.cli.main", *words]
        environment = ENVIRONMENT | self.slurm.environment | environment
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=60, env=environment
        )

    def launch(self, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `arealite launch slurm` with the smallest run."""
        return self.arealite(
            *("launch", "slurm", "experiment_name=e2e", "trial_name=t"),
            f"cluster.name_root={self.folder / 'names'}",
            f"cluster.run_root={self.folder / 'runs'}",
            f"model.path={self.inputs / 'model'}",
            f"dataset.train={self.inputs / 'train.jsonl'}",
            "trainer.ppo.batch_size=16",
            "trainer.ppo.collector.group_size=4",
            "trainer.ppo.collector.concurrency=32",
            "trainer.ppo.collector.sampling.max_new_tokens=6",
            "trainer.ppo.total_steps=4",
            "launcher.llm_servers=1",
            *overrides,
            **environment,
        )

    def submit(self, *overrides: str) -> str:
        """Launch a run, check that it is accepted, and return its job."""
        done = self.launch(*overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"^job (\d+);", done.stdout, re.MULTILINE)
        assert found, done.stdout
        return found[1]

    def log(self) -> str:
        file = self.paths.logs / "slurm.log"
        return file.read_text() if file.exists() else ""

    def until_logged(self, text: str) -> None:
        """Wait for a line of the supervisor's log; fail if the supervisor exits first."""
        said = text, "run folder:"
        until(lambda: any(each in self.log() for each in said), what=self.logs, seconds=SLOW_S)
        assert text in self.log(), self.logs()

    def until_ended(self, job: str) -> str:
        """Wait for the job's end; return its state."""
        until(
            lambda: self.slurm.job_state(job) in ENDED,
            what=lambda: f"the job's end\n{self.logs()}",
            seconds=SLOW_S,
        )
        return self.slurm.job_state(job)

    def logs(self) -> str:
        return "\n".join(f"== {f.name}\n{f.read_text()}" for f in self.paths.logs.glob("*.log"))

    def balanced(self) -> AuditReport:
        """Return the audit of the ledger, after a check that it lost and repeated nothing."""
        report = audit(self.paths.ledger)
        assert report.ok, report.table() + self.logs()
        return report

    def steps(self) -> dict[str, str]:
        """Return the live steps of roles: id by name."""
        lines = self.slurm.command("squeue", "-hs", "-o", "%j %i").splitlines()
        return dict(line.split() for line in lines if "-" in line)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model and a dataset."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model(folder / "model")
    write_rows(folder / "train.jsonl", 64, seed=1)
    return folder


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Return a cluster of four nodes that all tests without node faults share."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
    assert not cluster.strays()


def slurm_cluster(folder: Path, **options: object):
    """Start a cluster, or skip the test with the reason."""
    if why := missing():
        pytest.skip(why)
    return real_slurm(folder, **options)  # type: ignore[arg-type]


@pytest.fixture
def site(slurm: Slurm, inputs: Path, tmp_path: Path) -> Iterator[Site]:
    """Return a folder for a trial; its jobs are cancelled at the end."""
    yield Site(slurm, tmp_path, inputs)
    slurm.cancel_all()
