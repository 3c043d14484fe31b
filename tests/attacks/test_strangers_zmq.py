"""Attempts of peers without the secret on the datapipe's port."""

from __future__ import annotations

import random
import socket
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import zmq

from arealite.api import trainer_messages as trainer
from arealite.api.rollout_messages import Progress, Result, TurnHeader, WorkerState
from arealite.system.links import wire
from tests.attacks.conftest import Live
from tests.attacks.peers import PATIENCE_MS, STRANGERS, forged
from tests.e2e.conftest import SLOW_S
from tests.payloads import result_frames

pytestmark = [pytest.mark.attacks, pytest.mark.part, pytest.mark.timeout(2 * SLOW_S)]

REWARD = forged("g0", 0, reward=1e6)
RESULT, FRAMES = result_frames("rollout-0", [REWARD.episode("g0.1.1")], [REWARD.payload()])
MESSAGES: dict[str, list[Any]] = {
    "worker's state": [
        WorkerState(worker_id="rollout-9", capacity=1000, held=[], split_metrics={}, process="p")
    ],
    "result": [RESULT, *FRAMES],
    "result without payload": [Result(worker_id="rollout-0", episodes=[REWARD.episode("g0.1.1")])],
    "progress": [
        Progress(
            worker_id="rollout-0",
            lease_id="g0.1.1",
            group_id="g0",
            turns=[TurnHeader(member=0, seat="agent", index=0, oldest_version=0)],
        ),
        b"x",
    ],
    "trainer start": [trainer.TrainerStart(step=0, world_size=1)],
    "trainer start with a ticket": [trainer.TrainerStart(step=0, world_size=1, ticket=1 << 40)],
    "batch request": [trainer.BatchRequest(step=0, rank=0, world_size=1)],
    "step report": [trainer.StepReport(step=0, trained=[], metrics={})],
    "published": [trainer.Published(version=1000)],
    "checkpointed": [trainer.Checkpointed(step=10**6, path="/x")],
    "unusable": [trainer.Unusable(step=0, groups={"g0": "I say so"})],
    "evaluation": [trainer.EvalRequest(eval_id=2**31)],
    "finish": [trainer.Finish(reason="a stranger says so")],
}


@pytest.mark.parametrize("prepare", STRANGERS)
@pytest.mark.parametrize("name", MESSAGES)
def test_datapipe_accepts_no_message_without_the_secret(
    live: Live, name: str, prepare: Any
) -> None:
    before = live.rejected()
    context: wire.Context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    prepare(peer)
    monitor = peer.get_monitor_socket(wire.REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    peer.connect(live.datapipe)
    message, *payloads = MESSAGES[name]
    peer.send_multipart([wire.encode(message), *payloads])
    assert monitor.poll(PATIENCE_MS), "neither refused nor let in"
    event = monitor.recv_multipart()[0]
    assert int.from_bytes(event[:2], "little") & wire.REFUSALS
    assert not peer.poll(0), "something was read"
    peer.disable_monitor()
    monitor.close(0)
    peer.close(0)
    context.term()
    assert live.is_alive()
    assert live.rejected() == before, "the message did not reach the datapipe"


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.REQ, zmq.SUB, zmq.PULL])
def test_other_socket_types_without_the_secret_receive_nothing(live: Live, kind: int) -> None:
    context: wire.Context = zmq.Context()
    peer = context.socket(kind)
    peer.linger = 0
    if kind == zmq.SUB:
        peer.subscribe(b"")
    monitor = peer.get_monitor_socket(wire.REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    peer.connect(live.datapipe)
    assert monitor.poll(PATIENCE_MS)
    event = monitor.recv_multipart()[0]
    assert int.from_bytes(event[:2], "little") & wire.REFUSALS
    assert not peer.poll(0)
    peer.disable_monitor()
    monitor.close(0)
    peer.close(0)
    context.term()
    assert live.is_alive()


def test_datapipe_logs_refused_peers_once(live: Live) -> None:
    log = (live.paths.logs / "datapipe-0.log").read_text()
    assert log.count(wire.MISMATCH) == 1


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "null greeting": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
    "huge frame": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x06" + b"\xff" * 8,
    "as server": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\1" + bytes(31),
    "old protocol": b"\x01\x00" + b"\xff" * 100,
    "random": random.Random(1).randbytes(4096),
    "zeros": bytes(100_000),
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "nothing": b"",
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("port", ["datapipe", "server"])
def test_random_bytes_on_a_port_get_no_reply(live: Live, port: str, name: str) -> None:
    place = urlsplit(live.datapipe if port == "datapipe" else live.server)
    assert place.hostname == "127.0.0.1" and place.port
    said = b""
    with socket.create_connection((place.hostname, place.port)) as peer:
        peer.settimeout(PATIENCE_MS / 1000)
        try:
            peer.sendall(GARBAGE[name])
            peer.shutdown(socket.SHUT_WR)
            while piece := peer.recv(65536):
                said += piece
        except (ConnectionError, OSError) as error:
            assert not isinstance(error, TimeoutError), "the connection was not closed"
    # aiohttp returns the invalid request line to its sender, escaped.
    assert len(said) < 1000 + 5 * len(GARBAGE[name])
    assert live.secret.token.encode() not in said and b"weight_version" not in said
    assert live.is_alive()


def test_thousand_silent_connections_do_not_stop_the_run(live: Live) -> None:
    place = urlsplit(live.datapipe)
    assert place.hostname and place.port
    peers = [socket.create_connection((place.hostname, place.port)) for _ in range(1000)]
    live.wait_for_steps()
    for peer in peers:
        peer.close()
    live.wait_for_steps()


def test_ports_of_the_run_are_on_loopback(live: Live) -> None:
    """Gloo uses the address of the host name, which depends on the machine."""
    family = [psutil.Process(live.process.pid), psutil.Process(live.site.server.pid)]
    family += psutil.Process(live.process.pid).children(recursive=True)
    listening = [
        connection.laddr.ip
        for process in family
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    own = socket.gethostbyname(socket.gethostname())
    assert listening and {*listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1", own}
