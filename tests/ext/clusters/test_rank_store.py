"""Ranks of one attempt meet in a shared store; an error names the missing ranks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from arealite.base.errors import RoleError
from arealite.ext.clusters import rank_store as module
from arealite.ext.clusters.rank_store import rendezvous


def test_rendezvous_ignores_keys_of_an_earlier_attempt(monkeypatch) -> None:
    """The store has all keys of an earlier attempt, as the store of torchrun keeps them."""
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


def test_rendezvous_error_names_the_missing_ranks(monkeypatch) -> None:
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(held.port))
    with pytest.raises(RoleError, match=r"trainer-0 waited 0.2 s for ranks 1, 2"):
        rendezvous(0, 3, seconds=0.2)


def test_rank_without_a_rank_0_names_its_address(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RoleError, match=rf"trainer-1 cannot reach rank 0 at 127.0.0.1:{port}"):
        rendezvous(1, 2, seconds=0.2)


def test_end_of_rank_0_during_the_rendezvous_is_named(monkeypatch) -> None:
    served = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(served[0].port))
    monkeypatch.setattr(module.time, "sleep", lambda _: served.clear())  # rank 0 exits
    with pytest.raises(RoleError, match="trainer-1 cannot reach rank 0"):
        rendezvous(1, 2, seconds=60.0)
