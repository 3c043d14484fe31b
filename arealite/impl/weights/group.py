"""A process group beside the default group, in which a trainer sends weights to servers.

The default group has the trainer's ranks. Servers start and end at any time, so their group is
created and destroyed as needed. SGLang creates its side in the same way, so names, sizes and
backend must agree.
"""

import socket
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d


def open_store(
    host: str, port: int, world_size: int, timeout: timedelta, *, listener: socket.socket | None
) -> TCPStore:
    """Return the store of the rendezvous; rank 0 serves it on `listener`, which this call consumes.

    Without a listener, torch would listen on every interface.
    """
    descriptor = listener.detach() if listener else None
    return TCPStore(
        host, port, world_size, listener is not None, timeout=timeout, master_listen_fd=descriptor
    )


Address = tuple[str, int] | socket.socket


def join(
    address: Address, name: str, *, rank: int, world_size: int, backend: str, seconds: float
) -> dist.ProcessGroup:
    """Join the group `name` whose rank 0 listens at `address`; blocks until all ranks have joined.

    Args:
        address: on rank 0 the listening socket, which this call consumes.
        name: new for every group, because a store remembers the ranks of an earlier group.
        seconds: limit of the wait and of every later collective.

    Raises:
        RuntimeError, OSError: some ranks did not join in time, or the port is taken.
    """
    timeout = timedelta(seconds=seconds)
    listener = address if isinstance(address, socket.socket) else None
    host, port = address.getsockname()[:2] if isinstance(address, socket.socket) else address
    store = open_store(host, port, world_size, timeout, listener=listener)
    kind, keys, label = c10d.Backend(backend), c10d.PrefixStore(name, store), cast(Any, name)
    group: Any = c10d._new_process_group_helper(
        world_size, rank, [], kind, keys, group_name=label, timeout=timeout
    )[0]
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
