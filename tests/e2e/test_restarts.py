"""Every role of one run is killed and restarted; no sample is lost or repeated.

All kills are in one run, because a start takes long. The launcher is killed last.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Site, all_gone
from tests.waiting import has_exited, spawned, until, until_exited
from tools import soak

pytestmark = [pytest.mark.processes, pytest.mark.faults, pytest.mark.timeout(1800)]


@dataclass
class Run:
    """A live train.py with two ranks, and the parent of its server."""

    train: subprocess.Popen[str]
    server: subprocess.Popen[bytes]
    paths: RunPaths

    def pid(self, role: str) -> int | None:
        """Return the process of a role, None while there is none."""
        if role == "llm_server":
            children = psutil.Process(self.server.pid).children()
            servers = [c.pid for c in children if not soak.is_warm_parent(soak.arguments(c))]
            return next(iter(servers), None)
        if self.train.poll() is not None:
            return None
        for child in psutil.Process(self.train.pid).children():
            try:
                if child.cmdline()[-3:-1] == role.split("-"):
                    return child.pid
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return None

    def step(self) -> int:
        """Return the newest trained step."""
        text = self.paths.metrics.read_text() if self.paths.metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return max((int(line["step"]) for line in lines if "reward/mean" in line), default=0)

    def trains(self, *, beyond: int) -> None:
        """Wait until a step after `beyond` is trained."""
        over = lambda: self.step() > beyond or self.train.poll() is not None  # noqa: E731
        until(over, what=f"a step after {beyond}", seconds=SLOW_S)

    def kill(self, role: str) -> None:
        """Kill a role; wait until another process has its place (`make soak` measures how soon)."""
        before = self.pid(role)
        assert before is not None, f"{role} is not there to be killed"
        victim = psutil.Process(before)
        victim.kill()
        until(lambda: self.pid(role) not in (None, before), what=f"{role} again", seconds=SLOW_S)
        until_exited(victim)


@contextmanager
def running(site: Site, folder: Path) -> Iterator[Run]:
    """Run a server with its parent, and a train.py of many steps that uses it."""
    script = ROOT / "arealite" / "launch_llm_server.py"
    words = [*names(folder), f"model.path={site.model}"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, str(script), *words], stdout=log, stderr=log, env=ENVIRONMENT
        )
    try:
        with start(site, folder, "trainer.ppo.total_steps=100000") as train:
            yield Run(train, server, RunPaths(folder / "e2e" / "kills"))
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(SLOW_S) == 0, (folder / "server.log").read_text()
    all_gone(folder)


def names(folder: Path) -> list[str]:
    return ["experiment_name=e2e", "trial_name=kills", f"cluster.name_root={folder / 'names'}"]


def start(
    site: Site, folder: Path, *overrides: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run train.py with two ranks and a checkpoint every two steps."""
    fast = ["dataset.eval=null", "logger.types=[]", "trainer.ppo.checkpoint.export=false"]
    two = ["launcher.trainer_ranks=2", "trainer.ppo.checkpoint.every_steps=2"]
    own = f"trainer.ppo.publisher.disk.dir={folder / 'staged'}"  # other tests may clear /dev/shm
    command = site.command(folder, *names(folder), *fast, *two, own, *overrides)
    return spawned(command, ENVIRONMENT)


def leftovers(folder: Path) -> set[Path]:
    """Return the folders of staged weights whose process has exited."""
    mine = (folder / "staged").glob("arealite-*")
    return {path for path in mine if has_exited(int(path.name.split("-")[2]))}


def test_every_killed_role_is_restarted(site: Site, tmp_path: Path):
    with running(site, tmp_path) as run:
        run.trains(beyond=0)
        for role in ("rollout-0", "datapipe-0", "llm_server", "trainer-1"):
            step, rank = run.step(), run.pid("trainer-0")
            run.kill(role)
            alone = run.pid("trainer-0") == rank
            assert alone == (role != "trainer-1"), "only ranks come back together"
            run.trains(beyond=step)
        children = psutil.Process(run.train.pid).children(recursive=True)
        assert not leftovers(tmp_path), "the launcher has removed what the killed ranks staged"
        run.train.kill()
        shown = run.train.communicate(timeout=60)[0]
        until_exited(*children)  # roles are killed with the launcher
        assert leftovers(tmp_path), "a killed trainer cannot remove what it staged"
        for role in ("rollout-0", "datapipe-0", "trainer-1"):
            assert f"{role} died (killed by SIGKILL); started again (1 of 5)" in shown
        assert shown.count("; started again") == 3
        said = (tmp_path / "server.log").read_text()
        assert "llm_server died (killed by SIGKILL); started again (1 of 5)" in said
        steps = run.step() + 3
        with start(site, tmp_path, f"trainer.ppo.total_steps={steps}") as again:
            shown = again.communicate(timeout=SLOW_S)[0]
        assert again.returncode == 0, shown
        assert "died" not in shown
        assert not leftovers(tmp_path), "the next launcher has removed it"
        names_left = [f for f in (tmp_path / "names").rglob("*") if f.is_file()]
        of_trial = (".lock", "secret")
        of_server = [f for f in names_left if "llm_server" in str(f) or f.name in of_trial]
        assert names_left == of_server, "only the living server shows itself"
    report = audit(run.paths.ledger)
    assert report.ok and not report.lost and not report.repeated, report.table()
    assert report.groups.trained == steps * 4
    lines = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    trained = [int(line["step"]) for line in lines if "reward/mean" in line]
    assert trained == list(range(1, steps + 1)), "each step stands there once"
