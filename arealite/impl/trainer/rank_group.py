"""The ranks of a training job: this rank's index, and collectives of numbers over all ranks.

The trainers use torch.distributed only through this module, so tests run without a second process.
"""

import json
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from arealite.base.errors import RoleError
from arealite.impl.weights.process_group import open_store
from arealite.system.health.waits import OTHER_RANKS, Wait, counters

TIMEOUT = timedelta(hours=1)
"""Limit of a collective: longer than any evaluation or publish that one rank waits for alone."""
RENDEZVOUS_S = 300.0
"""Limit of the rendezvous: the first rank checks the run before it starts."""
POLL_S = 0.05
"""Pause between two reads of the store: keys that were set before this attempt raise no event."""

SHARED_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that is True if a store is served at MASTER_ADDR and MASTER_PORT. The agent
of torchrun sets it; without an agent, rank 0 serves the store."""

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
        if torch.cuda.is_available():
            torch.cuda.set_device(int(variables.get("LOCAL_RANK", 0)))
            backend = "cpu:gloo,cuda:nccl"
        else:
            torch.set_num_threads(threads)
            backend = "gloo"
        random.seed(seed + rank)
        np.random.seed((seed + rank) % 2**32)
        torch.manual_seed(seed + rank)
        store = HashStore() if size == 1 else None
        if variables.get(SHARED_STORE) == "True":
            store = rendezvous(rank, size)
        elif size > 1:
            address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            endpoint = socket.create_server(address) if rank == 0 else address
            store = open_store(endpoint, size, TIMEOUT)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )
        return cls(rank=rank, size=size)

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
    except dist.DistNetworkError as error:
        raise RoleError(
            f"trainer-{rank} cannot reach rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT). "
            "Its output may have the reason."
        ) from error


def _meet(store: TCPStore, rank: int, size: int, seconds: float) -> Store:
    """Exchange the ids of this attempt; return the store with the id of rank 0 as prefix."""
    attempt_id = uuid4().hex
    store.set(f"here/{rank}", attempt_id)
    end = time.monotonic() + seconds

    def check_deadline(missing: Sequence[int]) -> None:
        if time.monotonic() > end:
            absent = ", ".join(map(str, missing))
            raise RoleError(f"trainer-{rank} waited {seconds:g} s for ranks {absent}")

    with Wait(event="ranks to meet", owner=f"trainer-{rank}", on=OTHER_RANKS, seconds=seconds):
        if rank == 0:
            name = attempt_id
            _gather_ranks(store, name, size, check_deadline)
        else:
            name = _join_rank0(store, attempt_id, rank, check_deadline)
    store.set(f"seen/{rank}", name)
    return PrefixStore(name, store)


def _gather_ranks(
    store: TCPStore,
    name: str,
    size: int,
    check_deadline: Callable[[Sequence[int]], None],
) -> None:
    """Copy the ids of the other ranks until each rank has confirmed its own; runs on rank 0."""
    others = range(1, size)
    missing = list(others)
    while missing:
        check_deadline(missing)
        ids = {str(rank): _read(store, f"here/{rank}") for rank in others}
        store.set("met", json.dumps({"name": name} | ids))
        missing = [rank for rank in others if _read(store, f"seen/{rank}") != name]
        time.sleep(POLL_S)


def _join_rank0(
    store: TCPStore,
    attempt_id: str,
    rank: int,
    check_deadline: Callable[[Sequence[int]], None],
) -> str:
    """Wait until rank 0 has copied this rank's id; return the id of rank 0."""
    met = dict[str, str]()
    while met.get(str(rank)) != attempt_id:
        check_deadline([0])
        met = json.loads(_read(store, "met") or "{}")
        time.sleep(POLL_S)
    return met["name"]


def _read(store: TCPStore, key: str) -> str:
    """Return the text of a key of the store; "" without the key."""
    return store.get(key).decode() if store.check([key]) else ""
