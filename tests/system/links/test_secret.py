"""With CURVE, only processes with the trial's secret connect; refused processes log the reason."""

from __future__ import annotations

import asyncio

import pytest
import zmq
from structlog.testing import capture_logs

from arealite.base.errors import RoleError
from arealite.system.links import wire
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.links.worker_link import WorkerLink
from arealite.system.names.name_registry import Secret
from tests.waiting import eventually

OURS, THEIRS = Secret(key=b"a" * 32), Secret(key=b"b" * 32)


def sockets(
    server: Secret | None, client: Secret | None
) -> tuple[wire.Context, list[zmq.Socket[bytes]]]:
    context: wire.Context = zmq.Context()
    router = wire.open_socket(context, zmq.ROUTER, server)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    dealer = wire.open_socket(context, zmq.DEALER, client)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    return context, [router, dealer]


def end(context: wire.Context, opened: list[zmq.Socket[bytes]]) -> None:
    for socket in opened:
        wire.close(socket, linger_ms=0)
    context.term()


@pytest.mark.parametrize("secret", [OURS, None])
def test_both_directions_work_with_one_secret(secret: Secret | None) -> None:
    context, (router, dealer) = sockets(secret, secret)
    dealer.send(b"question")
    route, text = router.recv_multipart()
    router.send_multipart([route, text + b" answered"])
    assert dealer.recv() == b"question answered"
    assert wire.count_refused(router) == wire.count_refused(dealer) == 0
    end(context, [router, dealer])


@pytest.mark.parametrize("secret", [OURS, None])
def test_largest_frame_arrives_with_and_without_encryption(secret: Secret | None) -> None:
    """CURVE adds bytes to a frame; a refused frame would be resent forever."""
    context: wire.Context = zmq.Context()
    router = wire.open_socket(context, zmq.ROUTER, secret, max_mb=1)
    dealer = wire.open_socket(context, zmq.DEALER, secret)
    dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    dealer.send(bytes(1 << 20))
    assert router.poll(60_000)
    assert len(router.recv_multipart()[1]) == 1 << 20
    end(context, [router, dealer])


@pytest.mark.parametrize(
    ("server", "client"), [(OURS, THEIRS), (OURS, None), (None, OURS)], ids=["other", "none", "old"]
)
def test_another_secret_or_none_is_refused_and_counted(
    server: Secret | None, client: Secret | None
) -> None:
    context, (router, dealer) = sockets(server, client)
    dealer.send(b"question")
    watched = router if server else dealer
    assert watched.get_monitor_socket(wire.REFUSALS).poll(60_000)
    assert wire.count_refused(watched) > 0
    assert not router.poll(0)
    end(context, [router, dealer])


def test_trainer_with_another_secret_logs_it_and_exits() -> None:
    context: wire.Context = zmq.Context()
    router = wire.open_socket(context, zmq.ROUTER, OURS)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    link = TrainerLink(
        resolve=lambda: f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
        silence_s=5.0,
        context=context,
        secret=THEIRS,
    )
    with capture_logs() as logs, pytest.raises(RoleError, match="silent"):
        link.start(0)
    assert wire.MISMATCH in {str(line.get("why")) for line in logs}
    link.close(linger_ms=0)
    end(context, [router])


async def test_worker_with_another_secret_logs_it() -> None:
    context: wire.Context = zmq.Context()
    router = wire.open_socket(context, zmq.ROUTER, OURS)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    link = WorkerLink(
        resolve=lambda: address, worker_id="w", capacity=1, context=context, secret=THEIRS
    )
    with capture_logs() as logs:
        running = asyncio.ensure_future(link.run())
        why = lambda: [line for line in logs if line.get("why") == wire.MISMATCH]  # noqa: E731
        await eventually(why, "the line")
        running.cancel()
        await asyncio.wait([running])
    end(context, [router])
