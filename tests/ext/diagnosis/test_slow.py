"""A trainer rank that hangs in a computation is found, although it waits for no other role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arealite.ext.diagnosis.diagnosis import examine
from arealite.impl.trainer.metrics import FIRST_S, SLOW_S, Stopwatch
from arealite.system.health import waits
from arealite.system.health.waits import ITSELF
from tests.system.health.living import show, wait


def update(name: str, folder: Path, waited_s: float, *others: Any, meets: bool = False) -> None:
    computes = wait("time/update_s", ITSELF, waited_s, seconds=60.0)
    show(folder, name, computes, *others, counters={"in_collective": float(meets)})


def test_rank_that_computes_too_long_is_found_and_not_the_rank_in_a_collective(
    tmp_path: Path,
) -> None:
    update("trainer-0", tmp_path, 70.0, meets=True)
    update("trainer-1", tmp_path, 59.9)  # it is not the first to be late
    show(tmp_path, "rollout-0", wait("a lease", "datapipe-0", 70.0))
    show(tmp_path, "datapipe-0")
    (finding,) = examine(tmp_path)
    assert (finding.blocker, finding.cause) == ("trainer-1", "overdue")
    assert finding.detail.startswith("time/update_s never took so long")


def test_all_ranks_are_found_if_all_hang_in_a_collective(tmp_path: Path) -> None:
    update("trainer-0", tmp_path, 70.0, meets=True)
    update("trainer-1", tmp_path, 70.0, meets=True)
    assert {finding.blocker for finding in examine(tmp_path)} == {"trainer-0", "trainer-1"}


def test_rank_is_not_found_before_its_limit_or_while_it_has_another_wait(tmp_path: Path) -> None:
    update("trainer-0", tmp_path, 50.0)
    update("trainer-1", tmp_path, 70.0, wait("version 3", "llm_server-a", 65.0, seconds=90.0))
    show(tmp_path, "llm_server-a")
    assert examine(tmp_path) == []


def test_limit_of_a_step_part_is_derived_from_its_longest_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(waits, "table", table := set[waits.Wait]())
    clock, late_s = Stopwatch(), list[float | None]()
    for seconds in (20.0, 1.0, 0.0):
        with clock("time/update_s"):
            (shown,) = table
            late_s.append(shown.seconds)
            now += seconds
    with clock("wait/batch_s"):
        assert not table  # the link records this wait
    with clock("time/rows_s"):
        now += 0.1
    with clock("time/rows_s"):
        (shown,) = table
        assert shown.seconds == SLOW_S
    assert late_s == [FIRST_S, 100.0, 100.0]
