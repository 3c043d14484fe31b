"""Attempts of strangers on a live run: nothing is read, nothing is changed, the run goes on.

A stranger reaches every port of the run but cannot read its secret.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import zmq
from zmq.utils import z85

from arealite.api import trainer_messages as trainer
from arealite.api.rollout_messages import Episode, Progress, Result, TurnHeader, WorkerState
from arealite.system.ledger.audit import audit
from arealite.system.ledger.ledger import connect
from arealite.system.links import wire
from arealite.system.names.secret import Secret, read
from tests.attacks.conftest import Live
from tests.e2e.conftest import SLOW_S
from tests.impl.trainer.trajectories import header, segment
from tests.waiting import until

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(2 * SLOW_S)]

PATIENCE_MS = 60_000


def forged(group: str) -> Result:
    """Return a result with a reward of a million."""
    made = header(f"{group}/0/agent", [segment([3, 4, 5], sampled=2)], reward=1e6)
    return Result("rollout-0", [Episode(f"{group}.1.1", group, 0, [made], None)])


MESSAGES: dict[str, Any] = {
    "worker's state": WorkerState("rollout-9", 1000, [], {}, "p"),
    "result": forged("g0"),
    "result without payload": forged("g1"),
    "progress": Progress("rollout-0", "g0.1.1", "g0", [TurnHeader(0, "agent", 0, 0)]),
    "trainer start": trainer.TrainerStart(0, 1),
    "trainer start with a ticket": trainer.TrainerStart(0, 1, 1 << 40),
    "batch request": trainer.BatchRequest(0, 0, 1),
    "step report": trainer.StepReport(0, [], {}),
    "published": trainer.Published(1000),
    "checkpointed": trainer.Checkpointed(10**6, "/x"),
    "evaluation": trainer.EvalRequest(2**31),
    "finish": trainer.Finish("a stranger says so"),
}
GUESS = Secret(b"guess" * 6 + b"!!")


def no_security(socket: zmq.Socket[bytes]) -> None:
    """A peer that knows nothing of CURVE."""


def own_keys(socket: zmq.Socket[bytes]) -> None:
    """A peer with CURVE keys of its own, and a guess at the server's."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = zmq.curve_keypair()[0]


def wrong_secret(socket: zmq.Socket[bytes]) -> None:
    """A process of another trial."""
    router, dealer = (z85.encode(GUESS.derive(f"zmq {side}")) for side in ("router", "dealer"))
    socket.curve_serverkey = zmq.curve_public(router)
    socket.curve_secretkey, socket.curve_publickey = dealer, zmq.curve_public(dealer)


def plain_password(socket: zmq.Socket[bytes]) -> None:
    """A peer that offers ZeroMQ's PLAIN mechanism."""
    socket.plain_username, socket.plain_password = b"admin", b"admin"


@pytest.mark.parametrize("prepare", [no_security, own_keys, wrong_secret, plain_password])
@pytest.mark.parametrize("name", MESSAGES)
def test_datapipe_takes_no_message_of_a_stranger(live: Live, name: str, prepare: Any) -> None:
    context: wire.Context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    prepare(peer)
    monitor = peer.get_monitor_socket(wire.REFUSALS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    peer.connect(live.datapipe)
    peer.send_multipart([wire.encode(MESSAGES[name]), b"payload"])
    assert monitor.poll(PATIENCE_MS), "neither refused nor let in"
    event = monitor.recv_multipart()[0]
    assert int.from_bytes(event[:2], "little") & wire.REFUSALS
    assert not peer.poll(0)
    peer.disable_monitor()
    monitor.close(0)
    peer.close(0)
    context.term()
    assert live.process.poll() is None


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "null greeting": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
    "huge frame": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x06" + b"\xff" * 8,
    "random": os.urandom(4096),
    "zeros": bytes(100_000),
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("port", ["datapipe", "server"])
def test_garbage_on_a_port_reads_nothing(live: Live, port: str, name: str) -> None:
    place = urlsplit(live.datapipe if port == "datapipe" else live.server)
    assert place.hostname == "127.0.0.1" and place.port
    token = read(live.names)
    assert token is not None
    with socket.create_connection((place.hostname, place.port)) as peer:
        peer.sendall(GARBAGE[name])
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(PATIENCE_MS / 1000)
        said = b""
        while piece := peer.recv(65536):
            said += piece
    assert len(said) < 1000 and token.token.encode() not in said
    assert live.process.poll() is None


ROUTES = {
    "/generate": {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 1}},
    "/abort_request": {"abort_all": True},
    "/pause_generation": {"mode": "abort"},
    "/continue_generation": {},
    "/flush_cache": {},
    "/update_weights_from_disk": {"model_path": "/tmp"},
    "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "/begin_weight_update": {},
    "/end_weight_update": {},
    "/init_weights_update_group": {
        "master_address": "10.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
    },
    "/destroy_weights_update_group": {},
    "/update_weight_version": {"new_version": "\x1b]0;owned\x07"},
    "/weights_checker": {"action": "checksum"},
}  # fmt: skip
READS = ["/model_info", "/server_info", "/v1/models", "/v1/loads", "/openapi.json", "/ready"]


def strangers(live: Live) -> dict[str, tuple[dict[str, str], int]]:
    """Return what requests of strangers send, and the status of the answer."""
    secret = read(live.names)
    assert secret is not None
    ours = {"Authorization": f"Bearer {secret.token}"}
    return {
        "no token": ({}, 401),
        "another trial's token": ({"Authorization": f"Bearer {GUESS.token}"}, 401),
        "a page's request": (ours | {"Origin": "http://evil.example"}, 403),
        "a rebound name": (ours | {"Host": "evil.example"}, 403),
    }


@pytest.mark.parametrize(
    "who", ["no token", "another trial's token", "a page's request", "a rebound name"]
)
@pytest.mark.parametrize("path", [*ROUTES, *READS])
async def test_server_answers_no_stranger(live: Live, path: str, who: str) -> None:
    sent, status = strangers(live)[who]
    method = "POST" if path in ROUTES else "GET"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, live.server + path, json=ROUTES.get(path), headers=sent) as answer,
    ):
        assert answer.status == status
        assert len(await answer.read()) < 300
    assert live.process.poll() is None


def test_run_goes_on_and_ends_well(live: Live) -> None:
    """The last test: steps are made after all attempts, and the run's end is clean."""
    before = live.steps()
    until(lambda: live.steps() > before, what="a step after the attempts", seconds=SLOW_S)
    live.process.send_signal(signal.SIGINT)
    live.process.wait(SLOW_S)
    shown = (live.paths.root.parents[1] / "shown.txt").read_text()
    balance = audit(live.paths.ledger)
    assert balance.ok, balance.table()
    db = connect(live.paths.ledger, read_only=True)
    rewards = [reward for (reward,) in db.execute("SELECT reward FROM trajectories")]
    db.close()
    assert max(rewards) <= 1.0
    secret = read(live.names)
    assert secret is not None
    texts = [shown, *(file.read_text(errors="replace") for file in live.paths.logs.glob("*"))]
    texts += [live.paths.metrics.read_text(), live.paths.config.read_text()]
    for text in texts:
        assert secret.token not in text and secret.key.hex() not in text
    assert any("connection refused" in text for text in texts)
