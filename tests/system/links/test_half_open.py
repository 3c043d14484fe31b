"""Connections that are open at both ends but deliver nothing are replaced without loss."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog.testing

from arealite.api.config import ExperimentConfig
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.trainer_messages import Checkpointed, Finish, Published, StepReport
from arealite.system.ledger.audit import audit
from arealite.system.links.trainer_link import TrainerLink
from tests.fakes.proxy import Proxy, proxied
from tests.system.scenes import FakeWorker, episode, experiment, in_thread, piped, saved

NOTICED_S = 200.0
"""Deadline of the test in seconds; an idle machine needs a few seconds."""


def address(proxy: Proxy) -> str:
    return f"tcp://127.0.0.1:{proxy.port}"


async def test_half_open_connection_is_replaced(tmp_path: Path) -> None:
    """Worker and trainer continue over new connections; no result is lost or repeated."""
    config = experiment(tmp_path, pipe={"lease_ttl_s": 30.0})
    async with piped(config, rows=20) as pipe:
        port = int(pipe.address.rsplit(":", 1)[1])
        async with proxied(("127.0.0.1", port)) as first, proxied(("127.0.0.1", port)) as second:
            now = [first]
            broken = False

            def script(lease: Lease, member: int) -> Episode:
                nonlocal broken
                if len(pipe.store.trained) and not broken:
                    first.swallow, now[0], broken = True, second, True
                return episode(lease, member, reward=member % 2)

            worker = FakeWorker(lambda: address(now[0]), script=script)
            running = asyncio.create_task(worker.run())
            link = TrainerLink(lambda: address(now[0]), rank=0, world_size=1)
            with structlog.testing.capture_logs() as logs:
                async with asyncio.timeout(NOTICED_S):
                    seen = await in_thread(lambda: train(link, config))
                    await running
    assert broken, "the connection was cut in the middle of the run"
    assert first.swallowed > 0
    moved = [line for line in logs if line["event"] == "datapipe moved"]
    assert {line["before"] for line in moved} == {address(first)}
    assert len({t for ids in seen for t in ids}) == sum(map(len, seen)) == 6 * 4
    report = audit(pipe.ledger.path)
    assert report.ok and not report.failures_by_class, "no episode was run twice for it"


def train(link: TrainerLink, config: ExperimentConfig) -> list[list[str]]:
    """Train six steps; return the trained ids."""
    seen = list[list[str]]()
    link.start(0)
    link.report(Published(0))
    for step in range(6):
        answer = link.next_batch(step)
        assert answer is not None
        ids = [h.trajectory_id for h in answer[0].headers]
        seen.append(ids)
        link.report(StepReport(step, ids, {}))
        link.report(Published(step + 1))
    link.report(Checkpointed(*saved(config, 6)))
    link.report(Finish("test over"))
    link.close()
    return seen
