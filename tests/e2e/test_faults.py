"""Faults in one live run, one after the other: each is reported, and the run recovers.

All tests use one run, because a start takes seconds, and because long runs have several faults.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Site, all_gone
from tests.waiting import has_exited, until, until_exited
from tools import soak

pytestmark = [pytest.mark.processes, pytest.mark.faults, pytest.mark.timeout(1200)]

HANGS_S = 30.0
"""Seconds for which an episode hangs before its timeout."""
ROOM = 150_000
"""Largest file on the full disk, in bytes: more than a log, less than a checkpoint (250 KB)."""


@dataclass
class Live:
    """A live run, and the faults that a test can inject."""

    place: soak.Site
    paths: RunPaths
    orders: Path

    def shown(self) -> str:
        return (self.place.folder / "train.log").read_text()

    def steps(self) -> int:
        lines = self.paths.metrics.read_text().splitlines() if self.paths.metrics.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("}")]  # its writer may die
        return max((int(line["step"]) for line in whole), default=0)

    def role(self, name: str) -> psutil.Process:
        seen = dict[str, psutil.Process]()  # a role can end between two looks

        def is_there() -> bool:
            seen.update(self.place.roles())
            return name in seen

        until(is_there, what=f"{name} to be there", seconds=SLOW_S)
        return seen[name]

    def named(self, *words: str, since: int) -> None:
        """Wait until one new line on the terminal holds all words."""

        def found() -> bool:
            new = self.shown()[since:].splitlines()
            return any(all(word in line for word in words) for line in new)

        what = lambda: f"a line with {words} in:\n{self.shown()[since:]}"  # noqa: E731
        until(found, what=what, seconds=SLOW_S)

    def order(self, order: str) -> None:
        """Request a fault from the environment, and wait until it occurs."""
        self.orders.write_text(order)
        taken = lambda: not self.orders.exists()  # noqa: E731
        until(taken, what=f"somebody to take the order {order}", seconds=SLOW_S)

    def wait_for_steps(self) -> None:
        """Wait until two more steps are trained."""
        begin = self.steps()
        until(lambda: self.steps() >= begin + 2, what="further steps", seconds=SLOW_S)

    def why(self) -> str:
        """Return the output of `arealite why`."""
        command = [sys.executable, "-m", "arealite.cli.main", "why", str(self.paths.root)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SLOW_S, env=ENVIRONMENT, cwd=ROOT
        )
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def live(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Start a server and a run of two ranks and one worker; stop both, and audit the ledger."""
    folder = tmp_path_factory.mktemp("faults")
    orders = folder / "orders"
    names = [
        "experiment_name=e2e",
        "trial_name=faults",
        f"cluster.name_root={folder / 'names'}",
        f"model.path={site.model}",
    ]
    command = site.command(
        folder,
        *names,
        "imports=[tests.e2e.faulty]",
        "trainer.ppo.collector.env.type=faulty",
        f"trainer.ppo.collector.env.faulty.orders={orders}",
        f"trainer.ppo.collector.episode_timeout_s={HANGS_S}",
        "trainer.ppo.total_steps=100000",
        "trainer.ppo.checkpoint.every_steps=3",
        "launcher.trainer_ranks=2",
        "launcher.blocked_s=10",
        "launcher.max_restarts=20",
        "logger.types=[]",
    )
    script = str(ROOT / "arealite" / "launch_llm_server.py")
    place = soak.Site([sys.executable, script, *names], command, folder, ENVIRONMENT)
    run = Live(place, RunPaths(folder / "e2e" / "faults"), orders)
    place.start()
    try:
        until(lambda: run.steps() > 0, what="a trained step", seconds=SLOW_S)
        yield run
        place.launcher.send_signal(signal.SIGINT)
        assert place.launcher.wait(SLOW_S) == 130, run.shown()
    finally:
        place.stop()
    report = audit(run.paths.ledger)
    assert report.ok, report.table()
    all_gone(folder)


def test_trainer_is_restarted_after_a_checkpoint_fails_on_a_full_disk(live: Live) -> None:
    """This test is the first: metrics and logs are still small, only a checkpoint is too large."""
    since, victim = len(live.shown()), live.role("trainer-0")
    victim.rlimit(psutil.RLIMIT_FSIZE, (ROOM, ROOM))
    until_exited(victim, seconds=SLOW_S)  # as a checkpoint fails
    # all ranks raise rank 0's error, and any of them may be the first to exit
    live.named("trainer-", " died", "File too large", since=since)
    live.wait_for_steps()


@pytest.mark.parametrize("name", ["rollout-0", "datapipe-0", "trainer-1", "llm_server-0"])
def test_stopped_role_is_reported_and_restarted(live: Live, name: str) -> None:
    since, victim = len(live.shown()), live.role(name)
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        live.named(name.split("-")[0], "stopped", since=since)
        until_exited(victim, seconds=SLOW_S)
    finally:
        if not has_exited(victim):
            victim.kill()
    # For a moment after its end, the victim is a zombie, or the role has no process.
    until(lambda: live.role(name).pid != victim.pid, what=f"another {name}", seconds=SLOW_S)
    live.wait_for_steps()


def test_stopped_launcher_is_reported_by_why(live: Live) -> None:
    """No process supervises the launcher: the run continues, and `why` reports the launcher."""
    live.place.launcher.send_signal(signal.SIGSTOP)
    try:
        until(lambda: "launcher-0 is STOPPED" in live.why(), what="why", seconds=SLOW_S)
        live.wait_for_steps()
    finally:
        live.place.launcher.send_signal(signal.SIGCONT)
    live.wait_for_steps()


@pytest.mark.parametrize("order", ["block", "spin"])
def test_blocked_loop_is_reported_with_its_stack(live: Live, order: str) -> None:
    since, victim = len(live.shown()), live.role("rollout-0")
    live.order(order)
    live.named("rollout-0", "blocked", "faulty.py", since=since)
    until_exited(victim, seconds=SLOW_S)
    live.wait_for_steps()


def test_hanging_environment_is_reported(live: Live) -> None:
    live.order("hang")
    until(lambda: "on environment faulty" in live.why(), what="why to name it", seconds=SLOW_S)
    timed_out = lambda: audit(live.paths.ledger).failures_by_class.get("episode_timeout")  # noqa: E731
    until(timed_out, what="the episode's failure", seconds=SLOW_S)
    live.wait_for_steps()


def test_run_stops_if_the_ledger_cannot_be_written_and_resumes(site: Site, live: Live) -> None:
    """This test is the last: the run stops, because it cannot write its ledger; then it resumes."""
    since, victim = len(live.shown()), live.role("datapipe-0")
    victim.rlimit(psutil.RLIMIT_FSIZE, (ROOM, ROOM))
    live.named("cannot write the ledger", since=since)
    assert live.place.launcher.wait(SLOW_S) == 3
    assert "balanced" in live.shown()[since:]
    live.place.launch()
    live.wait_for_steps()
