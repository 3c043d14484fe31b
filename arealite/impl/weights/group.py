"""A process group beside the default one, in which a trainer sends weights to servers.

The default group is the trainer's own ranks; servers come and go, so theirs is made and unmade at
any time. SGLang makes its side in the same way, so names, sizes and back end must agree.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d


def open_store(
    host: str, port: int, world_size: int, timeout: timedelta, *, listener: socket.socket | None
) -> TCPStore:
    """Return the store through which ranks meet; rank 0 serves it on `listener`, which is used up.

    Without a listener of ours, torch would listen on every interface.
    """
    options: dict[str, Any] = {"world_size": world_size, "timeout": timeout}
    if listener is not None:
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    return TCPStore(host, port, **options)


def join(
    address: tuple[str, int] | socket.socket,
    name: str,
    *,
    rank: int,
    world_size: int,
    backend: str,
    seconds: float,
) -> dist.ProcessGroup:
    """Join the group `name` whose rank 0 listens at `address`; blocks until all ranks are there.

    Rank 0 gives the socket it listens with, which is used up: torch alone would listen on every
    interface. `name` is fresh for every group: a store remembers the ranks of an earlier one.
    `seconds` bounds the wait and every later collective.

    Raises:
        RuntimeError, OSError: the others did not come in time, or the port is taken.
    """
    timeout = timedelta(seconds=seconds)
    listener = address if isinstance(address, socket.socket) else None
    host, port = address.getsockname()[:2] if isinstance(address, socket.socket) else address
    store = open_store(host, port, world_size, timeout, listener=listener)
    made = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    group: Any = made[0]
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave(group: dist.ProcessGroup) -> None:
    """Destroy the group, also after a failed collective."""
    dist.destroy_process_group(group)
