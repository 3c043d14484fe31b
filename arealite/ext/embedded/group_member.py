"""Receives new weights as a member of a trainer's process group.

Joining and receiving block, so they run in a separate thread. Generation continues even if the
trainer crashes during an update.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from arealite.api.engine import Named
from arealite.ext.embedded.futures import resolve
from arealite.ext.weights import process_group as groups
from arealite.ext.weights.buckets import Layout, unpack
from arealite.impl.weights.tensor_names import PartialGroups

TIMEOUT_S = 60.0
"""Limit for the other ranks to join, and for the tensors of one update to arrive."""

T = TypeVar("T")


class GroupMember:
    """One rank of one group. Calls run in order.

    A started call runs to its end even if its caller is cancelled: other ranks take part in it.
    """

    def __init__(self, name: str, backend: str, device: torch.device) -> None:
        self.name = name
        self.backend = backend
        self.parts: PartialGroups = {}
        """Tensors of the running update that become parameters together with later ones."""
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._group: dist.ProcessGroup | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._main, name=f"group {name}", daemon=True).start()

    async def join(
        self,
        address: tuple[str, int],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """Join the group; wait for all ranks.

        Raises:
            RuntimeError, OSError: Some ranks did not join within TIMEOUT_S.
        """

        def join() -> None:
            self._group = groups.join(
                address,
                self.name,
                rank=rank,
                world_size=world_size,
                backend=self.backend,
                seconds=TIMEOUT_S,
            )

        try:
            await asyncio.wrap_future(self._call(join))
        except BaseException:
            self.leave()
            raise

    async def receive(self, layout: Layout, *, flat: bool) -> list[Named]:
        """Receive tensors from rank 0: one broadcast each, or one of all their bytes (`flat`).

        Raises:
            RuntimeError: Rank 0 has exited, or sent nothing within TIMEOUT_S.
        """
        received = self._call(partial(self._receive, layout, flat))
        return await asyncio.wrap_future(received)

    def leave(self) -> Future[None]:
        """Destroy this side of the group after the running call, then end the thread.

        The caller need not wait for the returned future.
        """
        left = self._call(self._leave)
        self._jobs.put(None)
        return left

    def _call(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put(partial(resolve, future, job))
        return future

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _receive(self, layout: Layout, flat: bool) -> list[Named]:
        named = self._receive_bytes(layout) if flat else self._receive_tensors(layout)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the engine's thread copies in another stream
        return named

    def _receive_bytes(self, layout: Layout) -> list[Named]:
        """Receive the bytes of all tensors in one broadcast."""
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device)
        dist.broadcast(buffer, src=0, group=self._group)
        return list(unpack(layout, buffer))

    def _receive_tensors(self, layout: Layout) -> list[Named]:
        """Receive each tensor in its own broadcast; all broadcasts run at the same time."""
        dtypes: list[torch.dtype] = [getattr(torch, dtype) for dtype in layout.dtypes]
        tensors = [
            torch.empty(shape, dtype=dtype, device=self.device)
            for dtype, shape in zip(dtypes, layout.shapes, strict=True)
        ]
        works: list[Any] = [
            dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors
        ]
        for work in works:
            work.wait()
        return list(zip(layout.names, tensors, strict=True))

    def _leave(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
