"""The ranks of a training job: who this one is, and the few numbers that all of them must share.

Apart from the trainer, so that torch.distributed appears in one place and tests run without a
second process.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from arealite.base.errors import RoleError
from arealite.impl.weights.group import open_store
from arealite.system.health.waits import OTHER_RANKS, Wait, counters

TIMEOUT = timedelta(hours=1)
"""Of a collective: longer than any evaluation or publish that one rank may wait for alone."""


MEET_S = 300.0
"""For ranks to start, which is as long as one checks the run and settles what to resume."""
POLL_S = 0.05
"""How often a rank looks for the others: a key that is left from before has no event."""


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
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = meet(rank, size)
        elif size > 1:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            listener = socket.create_server((host, port)) if rank == 0 else None
            store = open_store(host, port, size, TIMEOUT, listener=listener)
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
        with Wait(f"collective {count:.0f}", owner=f"trainer rank {self.rank}", on=OTHER_RANKS):
            dist.all_reduce(numbers, op=op)


def meet(rank: int, size: int, *, seconds: float = MEET_S) -> Store:
    """Wait for the other ranks of this attempt; return a store that only they share.

    torchrun keeps one store for all its attempts: a rank that is early finds addresses of the dead
    in it. So each says a word of its own, and goes on when rank 0 has said it back.

    Raises:
        RoleError: the others did not come; names them.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False)
    own, others = uuid4().hex, range(1, size)

    def said(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    store.set(f"here/{rank}", own)
    end, met, missing = time.monotonic() + seconds, {"name": own}, list(others)
    with Wait("ranks to meet", owner=f"trainer-{rank}", on=OTHER_RANKS, seconds=seconds):
        while missing if rank == 0 else met.get(str(rank)) != own:
            if time.monotonic() > end:
                absent = ", ".join(map(str, missing)) if rank == 0 else "0"
                raise RoleError(f"trainer-{rank} waited {seconds:g} s for ranks {absent}")
            if rank == 0:
                store.set("met", json.dumps(met | {str(r): said(f"here/{r}") for r in others}))
                missing = [r for r in others if said(f"seen/{r}") != own]
            else:
                met = json.loads(said("met") or "{}")
            time.sleep(POLL_S)
    store.set(f"seen/{rank}", met["name"])
    return PrefixStore(met["name"], store)
