"""`arealite launch ray` on a real Ray cluster of two nodes on this machine: runs end balanced
despite kills and lost nodes; invalid runs are refused before a process starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.impl.engine import checkpoint
from tests.e2e.conftest import ENVIRONMENT, strays
from tests.waiting import until

cluster_utils = pytest.importorskip(
    "ray.cluster_utils", reason="Ray is not installed: pip install -e '.[ray]'"
)
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's processes
]
STEPS = 6


class Site:
    """A cluster with a trial."""

    def __init__(self, folder: Path, inputs: Path) -> None:
        self.folder, self.inputs = folder, inputs
        self.paths = RunPaths(folder / "runs" / "e2e" / "ray")
        self.cluster: Any = cluster_utils.Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        self.other = self.cluster.add_node(num_cpus=4)

    def command(self, *overrides: str) -> list[str]:
        return [
            *(sys.executable, "-m", "arealite.cli.main", "launch", "ray"),
            *("experiment_name=e2e", "trial_name=ray", "cluster.host=127.0.0.1"),
            f"cluster.name_root={self.folder / 'names'}",
            f"cluster.run_root={self.folder / 'runs'}",
            f"model.path={self.inputs / 'model'}",
            f"dataset.train={self.inputs / 'train.jsonl'}",
            "trainer.ppo.batch_size=16",
            "trainer.ppo.collector.group_size=4",
            "trainer.ppo.collector.sampling.max_new_tokens=6",
            f"trainer.ppo.total_steps={STEPS}",
            "trainer.ppo.checkpoint.every_steps=2",
            "launcher.llm_servers=1",
            "launcher.trainer_ranks=2",
            f"launcher.ray.address={self.cluster.address}",
            "logger.types=[]",
            *overrides,
        ]

    def run(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*overrides), capture_output=True, text=True, timeout=200, env=ENVIRONMENT
        )

    @contextmanager
    def running(self, *overrides: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            self.command(*overrides),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def until_saved(self, process: subprocess.Popen[str]) -> None:
        saved = lambda: checkpoint.list_good(self.paths.checkpoints) or process.poll() is not None  # noqa: E731
        until(saved, what="a checkpoint", seconds=120)

    def role(self, *words: str) -> psutil.Process:
        """Return the process of a role of this run on any node."""
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if line[-3:-1] == list(words) and line[-1] == str(self.paths.root):
                return process
        raise AssertionError(f"no process {words}")

    def assert_balanced(self, steps: int = STEPS) -> None:
        report = audit(self.paths.ledger)
        assert report.ok, report.table()
        assert report.steps == steps
        until(lambda: not strays(self.paths.root), what="all roles to be gone", seconds=30)


@pytest.fixture
def site(tmp_path: Path, inputs: Path) -> Iterator[Site]:
    made = Site(tmp_path, inputs)
    yield made
    made.cluster.shutdown()


def test_killed_rank_restarts_all_ranks_on_two_nodes(site: Site) -> None:
    """Five processes need both nodes; a dead rank restarts both ranks."""
    with site.running("launcher.rollout_workers=2") as process:
        site.until_saved(process)
        site.role("trainer", "1").kill()
        shown = process.communicate(timeout=200)[0]
    assert process.returncode == 0, shown
    assert "trainer-1 died (killed by SIGKILL); started again" in shown
    assert "balanced: nothing lost" in shown
    site.assert_balanced()


def test_roles_of_a_lost_node_are_restarted_on_another_node(site: Site) -> None:
    """Roles of the lost node are restarted on a node with free resources."""
    with site.running("trainer.ppo.total_steps=60") as process:
        site.until_saved(process)
        site.cluster.add_node(num_cpus=4)
        site.cluster.remove_node(site.other, allow_graceful=False)
        shown = process.communicate(timeout=200)[0]
    assert process.returncode == 0, shown
    assert "started again" in shown
    site.assert_balanced(60)


def test_sigterm_writes_a_checkpoint_for_the_next_run(site: Site) -> None:
    with site.running("trainer.ppo.total_steps=1000000") as process:
        site.until_saved(process)
        process.terminate()
        shown = process.communicate(timeout=100)[0]
    assert process.returncode == 130, shown
    last = checkpoint.list_good(site.paths.checkpoints)[-1].name
    done = site.run(f"trainer.ppo.total_steps={int(last[5:]) + 1}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming after step {int(last[5:])} of" in done.stdout
    assert audit(site.paths.ledger).ok


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "launcher.rollout_workers=20",
            "the Ray cluster is too small: the run needs 23 CPUs, the cluster has 6",
        ),
        ("launcher.ray.trainer_gpus=1", "takes 2 GPUs, it has 0"),
        ("launcher.ray.trainer_cpus=5", "Ray found no place for 3 processes within"),
    ],
)
def test_too_small_ray_cluster_is_refused(site: Site, override: str, says: str) -> None:
    more = ["launcher.ray.cpus=0.1", "launcher.trainer_ranks=1"] if "cpus" in override else []
    done = site.run(override, "launcher.ray.start_s=3", *more)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_missing_ray_cluster_is_a_one_line_error(tmp_path: Path, site: Site) -> None:
    done = site.run("launcher.ray.address=127.0.0.1:9")
    assert done.returncode == 2
    assert "no Ray cluster at launcher.ray.address=127.0.0.1:9" in done.stderr
    assert "ray start --head" in done.stderr


def test_print_shows_the_resources_to_reserve(site: Site) -> None:
    done = site.run("--print", "launcher.ray.trainer_gpus=1")
    assert done.stdout.splitlines() == [
        "llm_server-0 CPU=1",
        "rollout-0 CPU=1",
        "trainer-0 CPU=1 GPU=1",
        "trainer-1 CPU=1 GPU=1",
    ]
