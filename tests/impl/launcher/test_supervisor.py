"""Restart budgets and the restart loop, with processes that only exit."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from arealite.impl.launcher.processes import Child, spawn
from arealite.impl.launcher.supervisor import Budget, Role, RoleFailed, Supervisor
from tests.waiting import has_exited


class Exits(Supervisor):
    """Supervises one role, whose processes exit with the given codes, in order."""

    def __init__(self, *codes: int, limit: int = 5) -> None:
        self.said, self.codes, self.most = list[str](), [*codes], 99
        super().__init__(self.said.append)
        self.role = Role(names=("x",), budget=Budget(limit=limit, pauses_s=(0.0,)), grace_s=0.0)
        self.roles = [self.role]

    async def start(self, role: Role) -> None:
        words = [sys.executable, "-S", "-c", f"raise SystemExit({self.codes.pop(0)})"]
        role.children = [await spawn("x", words, log=None, environment={})]

    def is_needed(self, role: Role, dead: Child) -> bool:
        self.most -= 1
        return self.most > 0 and dead.code != 0

    def mark(self) -> float:
        return 0.0


async def test_role_is_restarted_until_it_is_not_needed() -> None:
    supervisor = Exits(4, 5, 0, 6)
    await supervisor.supervise(supervisor.role)
    assert supervisor.said == [
        "x died (exit code 4); started again (1 of 5)",
        "x died (exit code 5); started again (2 of 5)",
    ]
    assert supervisor.codes == [6]


async def test_spent_budget_names_option_and_first_death() -> None:
    supervisor = Exits(4, 5, 6, limit=1)
    with pytest.raises(RoleFailed) as caught:
        await supervisor.supervise(supervisor.role)
    assert caught.value.exit_code == 5
    assert str(caught.value) == (
        "x died (exit code 5), 2 times without a further trained step; launcher.max_restarts=1. "
        "The first: x died (exit code 4)"
    )


async def test_role_that_is_not_needed_after_its_pause_is_not_restarted() -> None:
    supervisor = Exits(4, 5)
    supervisor.most = 2  # needed when it dies, no longer needed at its restart
    await supervisor.supervise(supervisor.role)
    assert (supervisor.said, supervisor.codes) == ([], [5])


async def test_death_names_the_reason_of_a_kill(tmp_path: Path) -> None:
    words = [sys.executable, "-S", "-c", "import time; print('busy', flush=True); time.sleep(600)"]
    child = await spawn("x", words, log=tmp_path / "log", environment={})
    child.reason = "it gave no answer"
    child.kill()
    await child.process.wait()
    assert child.exit_summary == "x died (killed by SIGKILL: it gave no answer)"
    assert child.exit_report.startswith(
        "x died (killed by SIGKILL: it gave no answer). Its last lines"
    )


async def test_cancelled_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    create, made = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process]()

    async def created(*words: str, **options: object) -> asyncio.subprocess.Process:
        starting.cancel()
        made.append(await create(*words, **options))  # type: ignore[arg-type]
        return made[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", created)
    words = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    starting = asyncio.ensure_future(spawn("x", words, log=None, environment={}))
    await asyncio.wait((starting,))
    assert starting.cancelled() and has_exited(made[0].pid)


def test_pauses_grow_while_deaths_follow_each_other():
    budget = Budget(limit=100)
    pauses = [budget.spend("x", mark=0, lived_s=1.0) for _ in range(9)]
    assert pauses == [0.0, 0.25, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert budget.spend("x", mark=0, lived_s=11.0) == 0.0, "it had lived for long"
    assert budget.spend("x", mark=0, lived_s=1.0) == 0.0, "the first of a new row"


def test_restart_budget_is_spent_after_limit_plus_one_deaths():
    budget = Budget(limit=2)
    said = [budget.spend(str(n), mark=-1, lived_s=1.0) is None for n in range(3)]
    assert said == [False, False, True]
    assert (budget.deaths, budget.first) == (3, "0")


def test_progress_resets_count_and_pauses():
    budget = Budget(limit=1)
    for mark in range(6):
        assert budget.spend(f"at {mark}", mark=mark, lived_s=1.0) == 0.0
    assert (budget.deaths, budget.first) == (1, "at 5")
    assert budget.spend("again", mark=5, lived_s=1.0) is None
    assert budget.first == "at 5"
