"""Attempts with the trial's token on the language-model server: bodies, paths, weights, pauses."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.attacks.conftest import Live
from tests.e2e.conftest import SLOW_S
from tests.hostile import HOSTILE
from tests.waiting import eventually

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(2 * SLOW_S)]

GIGABYTE = 1 << 30
REFUSED = (400, 404, 413, 422)


@pytest.fixture
async def session(live: Live) -> AsyncIterator[aiohttp.ClientSession]:
    """Return a session with the token; afterwards check that the server and the run continue."""
    async with aiohttp.ClientSession(live.server, headers=live.ours) as made:
        yield made
    await eventually(live.is_untouched, "the server to be well", seconds=SLOW_S)
    live.wait_for_steps()


async def post(session: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with session.post(path, data=data) as answer:
        return answer.status, await answer.text()


NESTED = b"[" * 10_000 + b"]" * 10_000
BODIES: dict[str, Any] = {
    "many prompts": {"input_ids": [[3, 4, 5]] * 2000, "sampling_params": {"n": 1024}},
    "many prompts of text": {"text": ["a" * 10] * 2000, "sampling_params": {"n": 1024}},
    "many generations": {"input_ids": [3], "sampling_params": {"n": 1024}},
    "endless": {"input_ids": [3], "sampling_params": {"max_new_tokens": 2**31 - 1}},
    "huge number": b'{"input_ids": [' + b"9" * 60_000 + b"]}",
    "a token of no vocabulary": {"input_ids": [10**6]},
    "a negative token": {"input_ids": [-1]},
    "a temperature that is none": b'{"input_ids": [3], "sampling_params": {"temperature": NaN}}',
    "a negative temperature": {"input_ids": [3], "sampling_params": {"temperature": -1}},
    "too many stops": {"input_ids": [3], "sampling_params": {"stop": ["a"] * 10_000}},
    "nested": NESTED,
    "nested prompts": b'{"input_ids": ' + NESTED + b"}",
    "nested where nothing is known": b'{"unknown": ' + NESTED + b', "input_ids": []}',
    "nested objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "no JSON": b"\xff\xfe\x00",
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.",
    "a list": [],
    "a null": b"null",
    "half of it": b'{"input_ids": [3',
    "a lone surrogate": b'{"rid": "\\ud800", "input_ids": []}',
}


@pytest.mark.parametrize("name", BODIES)
async def test_wrong_body_is_refused(session: aiohttp.ClientSession, name: str) -> None:
    status, _ = await post(session, "/generate", BODIES[name])
    assert status in REFUSED


@pytest.mark.parametrize(
    "path", ["/generate", "/abort_request", "/pause_generation", "/update_weights_from_disk",
             "/update_weights_from_distributed", "/update_weight_version"]
)  # fmt: skip
async def test_nested_body_is_refused_or_changes_nothing(
    session: aiohttp.ClientSession, path: str
) -> None:
    status, _ = await post(session, path, b'{"names": ' + NESTED + b', "mode": ' + NESTED + b"}")
    assert status in (*REFUSED, 200)
    if path != "/abort_request":
        assert status in REFUSED


async def gigabyte() -> AsyncIterator[bytes]:
    piece = b"x" * (1 << 16)
    for _ in range(GIGABYTE // len(piece)):
        yield piece


@pytest.mark.parametrize("path", ["/generate", "/update_weight_version", "/nowhere"])
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_body_of_a_gigabyte_is_refused_before_it_is_read(
    session: aiohttp.ClientSession, path: str, is_chunked: bool
) -> None:
    headers = {} if is_chunked else {"Content-Length": str(GIGABYTE)}
    try:
        async with session.post(path, data=gigabyte(), headers=headers) as answer:
            assert answer.status == 413
    except aiohttp.ClientOSError:
        pass  # closed during the send


@pytest.fixture
def folder(live: Live, tmp_path: Path) -> Path:
    """Return a copy of the model's folder, whose weights a test changes."""
    made = tmp_path / "weights"
    made.mkdir()
    for file in live.site.model.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    return made


def weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
async def test_weights_that_are_not_finite_are_refused(
    session: aiohttp.ClientSession, folder: Path, value: float
) -> None:
    weights(folder, lambda tensors: {k: torch.full_like(v, value) for k, v in tensors.items()})
    body = {"model_path": str(folder), "weight_version": "1000"}
    status, said = await post(session, "/update_weights_from_disk", body)
    assert status == 400 and "finite" in said


@pytest.mark.parametrize("how", ["shape", "missing", "more"])
async def test_weights_of_another_model_are_refused(
    session: aiohttp.ClientSession, folder: Path, how: str
) -> None:
    changes = {
        "shape": lambda t: {k: torch.zeros(3) for k in t},
        "missing": lambda t: dict([*t.items()][1:]),
        "more": lambda t: {**t, "owned": torch.zeros(1)},
    }
    weights(folder, changes[how])
    body = {"model_path": str(folder), "weight_version": "1000"}
    assert (await post(session, "/update_weights_from_disk", body))[0] == 400


@contextmanager
def fifo(path: Path) -> Iterator[None]:
    """Create a FIFO without a writer: opening it blocks forever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    yield
    path.unlink()


@pytest.mark.parametrize("name", ["", "model.safetensors", "other.safetensors"])
async def test_fifo_instead_of_weights_is_refused(
    session: aiohttp.ClientSession, folder: Path, name: str
) -> None:
    path = folder / name if name else folder.parent / "fifo"
    with fifo(path):
        body = {"model_path": str(folder if name else path), "weight_version": "1000"}
        assert (await post(session, "/update_weights_from_disk", body))[0] == 400


@pytest.mark.parametrize(
    "path", ["/dev/zero", "/dev/random", "/proc/self", "/etc", "/", "", ".", "/nowhere", "\0",
             "x" * 60_000, HOSTILE, "hf-internal-testing/tiny", "http://127.0.0.1:9/model"]
)  # fmt: skip
async def test_path_without_weights_is_refused(session: aiohttp.ClientSession, path: str) -> None:
    body = {"model_path": path, "weight_version": "1000"}
    status, said = await post(session, "/update_weights_from_disk", body)
    assert status == 400 and len(said) < 1000


async def test_truncated_weights_are_refused(session: aiohttp.ClientSession, folder: Path) -> None:
    file = folder / "model.safetensors"
    for content in (
        file.read_bytes()[:-100],
        b"\xff" * 8 + b"{}",
        b"\x08" + bytes(7) + b"[[[[[[[[",
    ):
        file.write_bytes(content)
        body = {"model_path": str(folder), "weight_version": "1000"}
        assert (await post(session, "/update_weights_from_disk", body))[0] == 400


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"master_port": 0}, "a port"),
        ({"master_port": 70_000}, "a port"),
        ({"rank_offset": 0}, "a rank"),
        ({"world_size": 1}, "a size"),
        ({"world_size": 10**9}, "a size"),
        ({"master_address": 5}, "an address"),
    ],
)
async def test_group_with_invalid_numbers_is_refused(
    session: aiohttp.ClientSession, body: dict[str, Any], name: str
) -> None:
    whole = {"master_address": "127.0.0.9", "master_port": 9, "rank_offset": 1, "world_size": 2}
    whole |= {"backend": "gloo", "group_name": name} | body
    assert (await post(session, "/init_weights_update_group", whole))[0] in REFUSED


@pytest.mark.parametrize("address", ["127.0.0.9", "nowhere.invalid", HOSTILE])
async def test_group_at_another_host_leaves_the_server_serving(
    live: Live, session: aiohttp.ClientSession, address: str
) -> None:
    """The server waits for the other host in a thread, which blocks no other request."""
    body = {"master_address": address, "master_port": 9, "rank_offset": 1, "world_size": 2}
    body |= {"backend": "gloo", "group_name": f"of {address}"}
    timeout = aiohttp.ClientTimeout(total=1.0)
    try:
        async with session.post("/init_weights_update_group", json=body, timeout=timeout) as answer:
            assert answer.status in REFUSED
    except TimeoutError:
        live.wait_for_steps()


@pytest.mark.parametrize("version", [HOSTILE, "\x1b[2J", "1000000", "", "x" * 10_000, "-1", "NaN"])
async def test_foreign_version_is_replaced_by_the_trainer(
    live: Live, session: aiohttp.ClientSession, version: str
) -> None:
    body = {"new_version": version, "abort_all_requests": False}
    assert (await post(session, "/update_weight_version", body))[0] == 200
    is_ours = lambda: live.info()["weight_version"] != version and live.is_untouched()  # noqa: E731
    await eventually(is_ours, "the trainer's version", seconds=SLOW_S)
    live.wait_for_steps()
    assert max(live.metrics("staleness/max"), default=0.0) <= 4.0


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_foreign_pause_is_ended_by_the_trainer(
    live: Live, session: aiohttp.ClientSession, mode: str
) -> None:
    """The trainer continues the server without a publish, for which it has no episodes."""
    assert (await post(session, "/pause_generation", {"mode": mode}))[0] == 200
    live.wait_for_steps(5)


async def test_aborted_generations_are_sampled_again(
    live: Live, session: aiohttp.ClientSession
) -> None:
    for _ in range(20):
        assert (await post(session, "/abort_request", {"abort_all": True}))[0] == 200
    live.wait_for_steps()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"GET /" + b"a" * 8000,
    ],
)
async def test_slow_connections_do_not_block_other_requests(
    live: Live, session: aiohttp.ClientSession, sent: bytes
) -> None:
    """tests/ext/http_server/test_http_limits.py tests when the server closes them."""
    place = urlsplit(live.server)
    assert place.hostname and place.port
    peers = [socket.create_connection((place.hostname, place.port)) for _ in range(200)]
    for peer in peers:
        peer.sendall(sent)
    body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 1}}
    status, said = await post(session, "/generate", body)
    assert status == 200 and json.loads(said)["output_ids"]
    live.wait_for_steps()
    for peer in peers:
        peer.close()


@pytest.mark.parametrize(
    "line",
    [
        b"GET /model_info HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n",
        b"GET http://evil.example/model_info HTTP/1.1\r\nHost: evil.example\r\n",
        b"GET /model_info HTTP/1.1\r\nHost: 127.0.0.1@evil.example\r\n",
        b"GET /model_info HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n",
        b"GET /model_info HTTP/1.1\r\nHost: [::1\r\n",
        b"GET /model_info HTTP/1.1\r\nHost: \r\n",
        b"GET /model_info HTTP/1.1\r\n",
        b"GET /model_info HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: null\r\n",
        b"GET /model_info HTTP/1.1\r\nHost: 127.0.0.1\r\norigin:\r\n",
        b"GET /model_info HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\n",
    ],
)
async def test_foreign_host_or_origin_is_refused_even_with_the_token(
    live: Live, line: bytes
) -> None:
    place = urlsplit(live.server)
    assert place.hostname and place.port
    token = live.ours["Authorization"].encode()
    with socket.create_connection((place.hostname, place.port)) as peer:
        peer.settimeout(SLOW_S)
        peer.sendall(line + b"Connection: close\r\nAuthorization: " + token + b"\r\n\r\n")
        said = b""
        while piece := peer.recv(65536):
            said += piece
    assert said.split(b" ")[1] in (b"400", b"403"), said
    assert b"weight_version" not in said
