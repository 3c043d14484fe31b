"""Collectives of ranks appear in the wait table with their blockers."""

from __future__ import annotations

from typing import Any

import pytest

from arealite.ext.clusters.rank_store import SHARED_STORE
from arealite.impl.trainer import rank_group as module
from arealite.impl.trainer.rank_group import World
from arealite.system.health import waits
from arealite.system.health.waits import OTHER_RANKS


def test_collective_is_a_numbered_wait_in_the_wait_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, float]] = []

    def all_reduce(*_: Any, **__: Any) -> None:
        (wait,) = (wait for wait in list(waits.table) if wait.on == OTHER_RANKS)
        seen.append((wait.event, wait.on, waits.counters["collectives"]))

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    waits.counters.clear()
    world = World(rank=1, size=2)
    assert world.max({"a": 1.0}) == {"a": 1.0}
    assert world.all(True)
    assert seen == [("collective 1", OTHER_RANKS, 1), ("collective 2", OTHER_RANKS, 2)]
    assert waits.counters["ranks"] == 2
    assert OTHER_RANKS not in {wait.on for wait in list(waits.table)}
    waits.counters.clear()


def test_single_rank_runs_no_collective() -> None:
    waits.counters.clear()
    assert World().sum({"a": 2.0}) == {"a": 2.0}
    assert not waits.counters


def test_command_of_one_process_ignores_the_variables_of_ranks(monkeypatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SHARED_STORE, "True")
    world = World.init(threads=1, seed=1, is_alone=True)
    try:
        assert world == World(rank=0, size=1)
    finally:
        world.destroy()
