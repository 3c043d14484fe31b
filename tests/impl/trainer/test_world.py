"""A collective is a wait that names whom it is for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from arealite.base.errors import RoleError
from arealite.impl.trainer import world as module
from arealite.impl.trainer.world import World, rendezvous
from arealite.system.health import waits
from arealite.system.health.waits import OTHER_RANKS


def test_a_collective_shows_in_the_table_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, float]] = []

    def all_reduce(*_: Any, **__: Any) -> None:
        (wait,) = (wait for wait in list(waits.table) if wait.on == OTHER_RANKS)
        seen.append((wait.what, wait.on, waits.counters["collectives"]))

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    waits.counters.clear()
    world = World(1, 2)
    assert world.max({"a": 1.0}) == {"a": 1.0}
    assert world.all(True)
    assert seen == [("collective 1", OTHER_RANKS, 1), ("collective 2", OTHER_RANKS, 2)]
    assert waits.counters["ranks"] == 2
    assert OTHER_RANKS not in {wait.on for wait in list(waits.table)}
    waits.counters.clear()


def test_alone_there_is_nobody_to_wait_for() -> None:
    waits.counters.clear()
    assert World().sum({"a": 2.0}) == {"a": 2.0}
    assert not waits.counters


def test_ranks_of_one_attempt_meet_past_what_an_earlier_one_left(monkeypatch) -> None:
    """Every word of a dead attempt is there, as in the store that torchrun keeps."""
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(held.port))
    for key, value in {
        "met": '{"name": "old", "0": "a", "1": "b"}',
        **{f"here/{rank}": "b" for rank in range(3)},
        **{f"seen/{rank}": "old" for rank in range(3)},
        "old/address": "of a dead rank",
    }.items():
        held.set(key, value)
    with ThreadPoolExecutor(3) as ranks:
        stores = list(ranks.map(lambda rank: rendezvous(rank, 3, seconds=60.0), (2, 1, 0)))
    stores[0].set("address", "mine")
    assert [store.get("address") for store in stores] == [b"mine"] * 3


def test_a_rank_that_does_not_come_is_named(monkeypatch) -> None:
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(held.port))
    with pytest.raises(RoleError, match=r"trainer-0 waited 0.2 s for ranks 1, 2"):
        rendezvous(0, 3, seconds=0.2)
