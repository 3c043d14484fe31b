"""Connections that are open at both ends but deliver nothing are replaced without loss."""

from __future__ import annotations

import asyncio

import structlog.testing

from arealite.api.rollout_messages import Episode, Lease
from arealite.ext.audit.audit import audit
from tests.fakes.proxy import Proxy, proxied
from tests.system.live import StartPipe
from tests.system.scenes import episode

NOTICED_S = 200.0
"""Deadline of the test in seconds; an idle machine needs a few seconds."""


def address(proxy: Proxy) -> str:
    return f"tcp://127.0.0.1:{proxy.port}"


async def test_half_open_connection_is_replaced(start_pipe: StartPipe) -> None:
    """Worker and trainer continue over new connections; no result is lost or repeated."""
    live = await start_pipe(rows=20, pipe={"lease_ttl_s": 30.0})
    port = int(live.address.rsplit(":", 1)[1])
    broken = False
    async with proxied(("127.0.0.1", port)) as first, proxied(("127.0.0.1", port)) as second:
        live.address = address(first)

        def script(lease: Lease, member: int) -> Episode:
            nonlocal broken
            if len(live.pipe.machine.store.trained) and not broken:
                first.swallow = True
                live.address = address(second)
                broken = True
            return episode(lease, member, reward=member % 2)

        live.work(script=script)
        with structlog.testing.capture_logs() as logs:
            async with asyncio.timeout(NOTICED_S):
                seen = await live.train(steps=6)
                await live.end()
    assert broken, "the connection was cut in the middle of the run"
    assert first.swallowed > 0
    moved = [line for line in logs if line["event"] == "datapipe moved"]
    assert {line["before"] for line in moved} == {address(first)}
    assert len({t for ids in seen for t in ids}) == sum(map(len, seen)) == 6 * 4
    report = audit(live.pipe.ledger.path)
    assert report.ok and not report.failures_by_class, "no episode was run twice for it"
