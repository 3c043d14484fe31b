"""The store of ranks that this program did not start: one for all attempts, served by an agent.

torchrun's agent serves it. Without an agent, rank 0 serves it as the agent does.
"""

import json
import os
import socket
import time
from datetime import timedelta
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from arealite.base.errors import RoleError, UserError
from arealite.system.health.waits import OTHER_RANKS, Wait

RENDEZVOUS_S = 300.0
"""Limit of the rendezvous: the first rank checks the run before it starts."""
POLL_S = 0.05
"""Pause between two reads of the store: keys that were set before this attempt raise no event."""
SHARED_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that is True if a store is served at MASTER_ADDR and MASTER_PORT. The agent
of torchrun sets it; without an agent, `store_of_ranks` sets it."""


def shared_store(rank: int, size: int) -> Store | None:
    """Return the store of this attempt, if a shared one is served (hook `rank_store`)."""
    if os.environ.get(SHARED_STORE) == "True":
        return rendezvous(rank, size)
    return None


def serve_store(host: str) -> TCPStore:
    """Serve the store of the ranks at MASTER_PORT, as torchrun's agent does.

    Args:
        host: Address on which this process, rank 0, listens.

    Returns:
        The store. It is served as long as this object exists.

    Raises:
        UserError: Rank 0 cannot listen at MASTER_PORT.
    """
    port = int(os.environ["MASTER_PORT"])
    try:
        listener = socket.create_server((host, port)).detach()
    except OSError as error:
        raise UserError(
            f"MASTER_PORT={port}: rank 0 cannot listen on it: {error.strerror}. "
            "Use a free port, the same for all ranks."
        ) from error
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    return TCPStore(
        host,
        port,
        world_size=None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def rendezvous(rank: int, size: int, *, seconds: float = RENDEZVOUS_S) -> Store:
    """Wait for the other ranks of this attempt; return a store that only they share.

    torchrun keeps one store for all its attempts, so an early rank finds addresses of ranks that
    have exited. Each rank therefore writes a new id, and continues once rank 0 has copied it.

    Args:
        rank: This rank.
        size: Number of ranks.
        seconds: Limit of the connection to the store, and then of the wait for the other ranks.

    Raises:
        RoleError: some ranks did not join in time; the message names them. Or no store is served.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
        return _meet(store, rank, size, seconds)
    except DistNetworkError as error:
        raise RoleError(
            f"trainer-{rank} cannot reach rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT). "
            "Its output may have the reason."
        ) from error


def _meet(store: TCPStore, rank: int, size: int, seconds: float) -> Store:
    """Exchange the ids of this attempt; return the store with the id of rank 0 as prefix."""
    attempt_id = uuid4().hex
    store.set(f"here/{rank}", attempt_id)
    end = time.monotonic() + seconds
    name = attempt_id
    with Wait(event="ranks to meet", owner=f"trainer-{rank}", on=OTHER_RANKS, seconds=seconds):
        while True:
            if rank == 0:
                missing = _unconfirmed_ranks(store, name, size)
            else:
                name = _name_of_rank0(store, attempt_id, rank)
                missing = [] if name else [0]
            if not missing:
                break
            if time.monotonic() > end:
                absent = ", ".join(map(str, missing))
                raise RoleError(f"trainer-{rank} waited {seconds:g} s for ranks {absent}")
            time.sleep(POLL_S)
    store.set(f"seen/{rank}", name)
    return PrefixStore(name, store)


def _unconfirmed_ranks(store: TCPStore, name: str, size: int) -> list[int]:
    """Copy the ids of the other ranks; return the ranks that have not confirmed it yet."""
    others = range(1, size)
    ids = {str(rank): _read(store, f"here/{rank}") for rank in others}
    store.set("met", json.dumps({"name": name} | ids))
    return [rank for rank in others if _read(store, f"seen/{rank}") != name]


def _name_of_rank0(store: TCPStore, attempt_id: str, rank: int) -> str:
    """Return the id of rank 0; "" until rank 0 has copied this rank's id."""
    met: dict[str, str] = json.loads(_read(store, "met") or "{}")
    return met["name"] if met.get(str(rank)) == attempt_id else ""


def _read(store: TCPStore, key: str) -> str:
    """Return the text of a key of the store; "" without the key."""
    return store.get(key).decode() if store.check([key]) else ""
