"""The ranks of a training job: this rank's index, and collectives of numbers over all ranks.

The trainers use torch.distributed only through this module, so tests run without a second process.
"""

import os
import random
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from arealite.base import entries
from arealite.system.health.waits import OTHER_RANKS, Wait, counters

TIMEOUT = timedelta(hours=1)
"""Limit of a collective: longer than any evaluation or publish that one rank waits for alone."""

Address = tuple[str, int] | socket.socket
"""Where the store of a rendezvous listens: on rank 0 the listening socket."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks."""

    rank: int = 0
    size: int = 1

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which alone reports, publishes and logs."""
        return self.rank == 0

    @classmethod
    def init(cls, *, threads: int, seed: int, is_alone: bool = False) -> "World":
        """Initialise torch.distributed from RANK, WORLD_SIZE and MASTER_*; one rank without them.

        Args:
            threads: of torch on a CPU.
            seed: of Python, NumPy and torch on rank 0; rank r uses seed + r.
            is_alone: Ignore the variables, for a command of one process in a shell that has them.
        """
        variables = {} if is_alone else os.environ
        rank = int(variables.get("RANK", 0))
        size = int(variables.get("WORLD_SIZE", 1))
        store: Store | None = None
        if not is_alone:
            store = entries.first_result(entries.hooks("rank_store"), rank, size)
        if store is None and size > 1:
            address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            endpoint = socket.create_server(address) if rank == 0 else address
            store = open_store(endpoint, size, TIMEOUT)
        world = cls(rank=rank, size=size)
        world.init_process_group(
            store, device=int(variables.get("LOCAL_RANK", 0)), threads=threads, seed=seed
        )
        return world

    def init_process_group(
        self, store: Store | None, *, device: int, threads: int, seed: int
    ) -> None:
        """Initialise torch.distributed on this rank.

        Args:
            store: that of the rendezvous; None: there is one rank.
            device: index of this rank's CUDA device.
            threads: as in `init`.
            seed: as in `init`.
        """
        if torch.cuda.is_available():
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        else:
            torch.set_num_threads(threads)
            backend = "gloo"
        rank_seed = seed + self.rank
        random.seed(rank_seed)
        np.random.seed(rank_seed % 2**32)
        torch.manual_seed(rank_seed)
        dist.init_process_group(
            backend,
            store=store or HashStore(),
            rank=self.rank,
            world_size=self.size,
            timeout=TIMEOUT,
        )

    def all(self, flag: bool) -> bool:
        """Return whether `flag` is true on every rank."""
        return not self.any(not flag)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on some rank."""
        return self.max({"flag": float(flag)})["flag"] > 0.0

    def barrier(self) -> None:
        """Wait until every rank calls this method."""
        self.any(False)

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Add up each number over the ranks; every rank passes the same names."""
        sums = self.add(np.array([*values.values()]))
        return dict(zip(values, sums.tolist(), strict=True))

    def max(self, values: dict[str, float]) -> dict[str, float]:
        """Return the largest of each number over the ranks; every rank passes the same names."""
        largest = self._reduce(np.array([*values.values()]), dist.ReduceOp.MAX)
        return dict(zip(values, largest.tolist(), strict=True))

    def add(self, numbers: np.ndarray) -> np.ndarray:
        """Add up float64 arrays of one shape; exact where all ranks but one pass 0."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def broadcast(self, value: T) -> T:
        """Return the value that rank 0 passed; the values of the other ranks are ignored."""
        box = [value]
        if self.size > 1:
            with self._wait():
                dist.broadcast_object_list(box, src=0)
        return box[0]

    def destroy(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, numbers: np.ndarray, op: dist.ReduceOp.RedOpType) -> np.ndarray:
        if self.size == 1:
            return numbers
        tensor = torch.from_numpy(numbers.astype(np.float64))
        with self._wait():
            dist.all_reduce(tensor, op=op)
        return tensor.numpy()

    def _wait(self) -> Wait:
        number = counters.get("collectives", 0.0) + 1
        counters["collectives"] = number
        counters["ranks"] = self.size
        return Wait(
            event=f"collective {number:.0f}", owner=f"trainer rank {self.rank}", on=OTHER_RANKS
        )


def open_store(
    address: Address,
    world_size: int,
    timeout: timedelta,
) -> TCPStore:
    """Return the store of the rendezvous; rank 0 serves it on its socket, which this call consumes.

    Without a socket, torch would listen on every interface.
    """
    if not isinstance(address, socket.socket):
        return TCPStore(*address, world_size, timeout=timeout)
    host, port = address.getsockname()[:2]
    descriptor = address.detach()
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=descriptor,
    )
