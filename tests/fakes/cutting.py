"""A TCP proxy that cuts connections at random bytes of the answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class CuttingProxy:
    """Forwards bytes to `target`; aborts some connections within `longest` bytes of answers.

    Args:
        target: Host and port.
        seed: Seed of the cuts.
        share: Probability of a cut of a connection.
        longest: Largest number of bytes of answers before the cut.
    """

    def __init__(
        self, target: tuple[str, int], *, seed: int = 0, share: float = 0.5, longest: int = 1500
    ) -> None:
        self.target, self.share, self.longest = target, share, longest
        self.rng = random.Random(seed)
        self.port = 0
        self.cut = 0
        """Number of connections that were cut after a request arrived."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        left = self.rng.randrange(self.longest) if self.rng.random() < self.share else -1
        ahead = await asyncio.open_connection(*self.target)
        up = asyncio.create_task(self._pump(reader, ahead[1]))
        try:
            while data := await ahead[0].read(65536):
                if 0 <= left <= len(data):
                    writer.write(data[:left])
                    self.cut += 1
                    break
                left -= len(data) if left >= 0 else 0
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            up.cancel()
            for each in (writer, ahead[1]):
                if left >= 0:
                    each.transport.abort()
                each.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()

    async def end(self) -> None:
        """Cancel all connections."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def cutting(target: tuple[str, int], **options: float) -> AsyncIterator[CuttingProxy]:
    """Run a proxy on a free loopback port."""
    proxy = CuttingProxy(target, **options)  # type: ignore[arg-type]
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
