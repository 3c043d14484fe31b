"""A collective is a wait that names whom it is for."""

from __future__ import annotations

from typing import Any

import pytest

from arealite.impl.trainer import world as module
from arealite.impl.trainer.world import World
from arealite.system import waits
from arealite.system.waits import OTHER_RANKS


def test_a_collective_shows_in_the_table_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, float]] = []

    def all_reduce(*_: Any, **__: Any) -> None:
        (wait,) = waits.table
        seen.append((wait.what, wait.on, waits.counters["collectives"]))

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    waits.counters.clear()
    world = World(1, 2)
    assert world.max({"a": 1.0}) == {"a": 1.0}
    assert world.all(True)
    assert seen == [("collective 1", OTHER_RANKS, 1), ("collective 2", OTHER_RANKS, 2)]
    assert waits.counters["ranks"] == 2
    assert not waits.table
    waits.counters.clear()


def test_alone_there_is_nobody_to_wait_for() -> None:
    waits.counters.clear()
    assert World().sum({"a": 2.0}) == {"a": 2.0}
    assert not waits.counters
