"""The ranks of a training job: who this one is, and the few numbers that all of them must share.

Apart from the trainer, so that torch.distributed appears in one place and tests run without a
second process.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from arealite.system.waits import OTHER_RANKS, counters, waiting

TIMEOUT = timedelta(hours=1)
"""Of a collective: longer than any evaluation or publish that one rank may wait for alone."""


@dataclass(frozen=True)
class World:
    """This process among the ranks."""

    rank: int = 0
    size: int = 1

    @property
    def lead(self) -> bool:
        """Whether this is rank 0, which alone speaks for the job."""
        return self.rank == 0

    @classmethod
    def join(cls, *, threads: int, seed: int) -> World:
        """Initialise torch.distributed from RANK, WORLD_SIZE, MASTER_*; without them, alone."""
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            backend = "cpu:gloo,cuda:nccl"
        else:
            torch.set_num_threads(threads)
            backend = "gloo"
        random.seed(seed + rank)
        np.random.seed((seed + rank) % 2**32)
        torch.manual_seed(seed + rank)
        store = HashStore() if size == 1 else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        return cls(rank, size)

    def all(self, flag: bool) -> bool:
        """Say whether `flag` holds on every rank."""
        return not self.any(not flag)

    def any(self, flag: bool) -> bool:
        """Say whether `flag` holds on some rank."""
        return self.max({"flag": float(flag)})["flag"] > 0.0

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Add up numbers over ranks; every rank gives the same names."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: dict[str, float]) -> dict[str, float]:
        """Take the largest of each number over ranks; every rank gives the same names."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def add(self, numbers: np.ndarray) -> np.ndarray:
        """Add up float64 arrays of one shape over ranks; exact where all but one rank give 0."""
        if self.size == 1:
            return numbers
        tensor = torch.from_numpy(numbers.astype(np.float64))
        self._all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor.numpy()

    def leave(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: dict[str, float], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
        if self.size == 1:
            return values
        numbers = torch.tensor([*values.values()], dtype=torch.float64)
        self._all_reduce(numbers, op)
        return dict(zip(values, numbers.tolist(), strict=True))

    def _all_reduce(self, numbers: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        count = counters["collectives"] = counters.get("collectives", 0.0) + 1
        counters["ranks"] = self.size
        with waiting(f"collective {count:.0f}", owner=f"trainer rank {self.rank}", on=OTHER_RANKS):
            dist.all_reduce(numbers, op=op)
