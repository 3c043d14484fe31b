"""A process group beside the default group, in which a trainer sends weights to servers.

The default group has the trainer's ranks. Servers start and end at any time, so their group is
created and destroyed as needed. SGLang creates its side in the same way, so names, sizes and
backend must agree.
"""

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from arealite.impl.trainer.rank_group import Address, open_store


def join(
    address: Address,
    name: str,
    *,
    rank: int,
    world_size: int,
    backend: str,
    seconds: float,
) -> dist.ProcessGroup:
    """Join the group `name` whose rank 0 listens at `address`; blocks until all ranks have joined.

    Args:
        address: see open_store.
        name: new for every group, because a store remembers the ranks of an earlier group.
        seconds: limit of the wait and of every later collective.

    Raises:
        RuntimeError, OSError: some ranks did not join in time, or the port is taken.
    """
    timeout = timedelta(seconds=seconds)
    store = open_store(address, world_size, timeout)
    group: Any
    group, *_ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=cast(Any, name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group
