"""Attempts with the trial's token on the language-model server: bodies, paths, weights, pauses."""

from __future__ import annotations

import json
import os
import re
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
from tests.attacks.kinds import KIND
from tests.e2e.conftest import SLOW_S
from tests.hostile import BROKEN_INDEXES, HOSTILE
from tests.waiting import eventually, until

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(2 * SLOW_S)]

GIGABYTE = 1 << 30
GET = f"GET {KIND.version} HTTP/1.1\r\n".encode()
POST = f"POST {KIND.generate} HTTP/1.1\r\n".encode()
MISMATCH = "mismatch/logprob_abs_diff_mean_current"
"""Metric of steps whose batch has tokens of the newest version."""
TOLERANCE = 1e-4
"""Largest mean difference of a log-probability in float32 if the server has the trainer's weights.
"""


@pytest.fixture
async def session(live: Live) -> AsyncIterator[aiohttp.ClientSession]:
    """Return a session with the token; afterwards check that the server and the run continue."""
    async with aiohttp.ClientSession(live.server, headers=live.ours) as made:
        yield made
    await eventually(live.is_untouched, "the server to be well", seconds=SLOW_S)
    live.wait_for_steps()
    assert live.server_pid == live.first_server_pid
    assert max(live.metrics(MISMATCH), default=0.0) <= TOLERANCE


async def post(session: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, str]:
    """Post a body of the embedded server in the spelling of the attacked kind."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    # vLLM closes a connection after an internal error, when the next request may be on its way.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    async with session.post(path, data=KIND.spell(data), headers=headers) as answer:
        return answer.status, await answer.text()


async def refuses(session: aiohttp.ClientSession, folder: Path | str) -> tuple[bool, str]:
    """Send the weights of a folder; return whether they are refused, and the answer."""
    status, said = await post(session, *KIND.update(folder))
    return KIND.refuses(status, said), said


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
    status, said = await post(session, KIND.generate, BODIES[name])
    assert status in KIND.refusals or name in KIND.served, said


@pytest.mark.parametrize("path", KIND.posts)
async def test_nested_body_is_refused_or_changes_nothing(
    session: aiohttp.ClientSession, path: str
) -> None:
    status, _ = await post(session, path, b'{"names": ' + NESTED + b', "mode": ' + NESTED + b"}")
    assert status in KIND.refusals or (status == 200 and path in KIND.takes_any_body)


async def gigabyte() -> AsyncIterator[bytes]:
    piece = b"x" * (1 << 16)
    for _ in range(GIGABYTE // len(piece)):
        yield piece


@pytest.mark.parametrize("path", [KIND.generate, "/update_weight_version", "/nowhere"])
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_body_of_a_gigabyte_is_refused_before_it_is_read(
    session: aiohttp.ClientSession, path: str, is_chunked: bool
) -> None:
    headers = {} if is_chunked else {"Content-Length": str(GIGABYTE)}
    try:
        async with session.post(path, data=gigabyte(), headers=headers) as answer:
            assert answer.status in KIND.too_large
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


@pytest.mark.skipif(not KIND.checks_numbers, reason="this kind does not read the numbers first")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
async def test_weights_that_are_not_finite_are_refused(
    session: aiohttp.ClientSession, folder: Path, value: float
) -> None:
    weights(folder, lambda tensors: {k: torch.full_like(v, value) for k, v in tensors.items()})
    is_refused, said = await refuses(session, folder)
    assert is_refused and "finite" in said


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
    is_refused, said = await refuses(session, folder)
    assert is_refused, said


@contextmanager
def fifo(path: Path) -> Iterator[None]:
    """Create a FIFO without a writer: opening it blocks forever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    yield
    path.unlink()


@pytest.mark.parametrize("content", BROKEN_INDEXES)
async def test_broken_index_of_weights_is_refused(
    session: aiohttp.ClientSession, folder: Path, content: str
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    is_refused, said = await refuses(session, folder)
    assert is_refused, said


@pytest.mark.parametrize(
    "name", ["", "model.safetensors", "other.safetensors", "model.safetensors.index.json"]
)
async def test_fifo_instead_of_weights_is_refused(
    session: aiohttp.ClientSession, folder: Path, name: str
) -> None:
    path = folder / name if name else folder.parent / "fifo"
    if name not in ("", "model.safetensors"):  # else the file is not read
        (folder / "model.safetensors").unlink()
    with fifo(path):
        is_refused, said = await refuses(session, folder if name else path)
        assert is_refused, said


@pytest.mark.parametrize(
    "path", ["/dev/zero", "/dev/random", "/proc/self", "/etc", "/", "", ".", "/nowhere", "\0",
             "x" * 60_000, HOSTILE, "hf-internal-testing/tiny", "http://127.0.0.1:9/model"]
)  # fmt: skip
async def test_path_without_weights_is_refused(session: aiohttp.ClientSession, path: str) -> None:
    is_refused, said = await refuses(session, path)
    assert is_refused and len(said) < 1000


async def test_truncated_weights_are_refused(session: aiohttp.ClientSession, folder: Path) -> None:
    file = folder / "model.safetensors"
    for content in (
        file.read_bytes()[:-100],
        b"\xff" * 8 + b"{}",
        b"\x08" + bytes(7) + b"[[[[[[[[",
    ):
        file.write_bytes(content)
        is_refused, said = await refuses(session, folder)
        assert is_refused, said


@pytest.mark.parametrize("request_", KIND.parts_of_update, ids=lambda sent: sent[0])
async def test_part_of_an_update_changes_no_weights(
    live: Live, session: aiohttp.ClientSession, request_: tuple[str, Any]
) -> None:
    """During a publish, such a part may spoil it; the trainer then publishes again."""
    for _ in range(5):
        await post(session, *request_)
    live.wait_for_steps()


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
    status, said = await post(session, KIND.join, KIND.join_body(whole))
    assert status in KIND.refusals, said


@pytest.mark.parametrize("address", ["127.0.0.9", "nowhere.invalid", HOSTILE])
async def test_group_at_another_host_leaves_the_server_serving(
    live: Live, session: aiohttp.ClientSession, address: str
) -> None:
    """The server waits for the other host in a thread, which blocks no other request."""
    body = {"master_address": address, "master_port": 9, "rank_offset": 1, "world_size": 2}
    body |= {"backend": "gloo", "group_name": f"of {address}"}
    timeout = aiohttp.ClientTimeout(total=1.0)
    try:
        async with session.post(KIND.join, json=KIND.join_body(body), timeout=timeout) as answer:
            assert answer.status in KIND.refusals
    except TimeoutError:
        live.wait_for_steps()


@pytest.mark.parametrize("version", [HOSTILE, "\x1b[2J", "1000000", "", "x" * 10_000, "-1", "NaN"])
async def test_foreign_version_is_replaced_by_the_trainer(
    live: Live, session: aiohttp.ClientSession, version: str
) -> None:
    body = {"new_version": version, "abort_all_requests": False}
    assert (await post(session, "/update_weight_version", body))[0] == 200
    is_ours = lambda: live.version() != version and live.is_untouched()  # noqa: E731
    await eventually(is_ours, "the trainer's version", seconds=SLOW_S)
    live.wait_for_steps()
    assert max(live.metrics("staleness/max"), default=0.0) <= 4.0


@pytest.mark.parametrize("pause", KIND.pauses, ids=str)
async def test_foreign_pause_is_ended_by_the_trainer(
    live: Live, session: aiohttp.ClientSession, pause: tuple[str, Any]
) -> None:
    """The trainer continues the server without a publish, for which it has no episodes."""
    assert (await post(session, *pause))[0] == 200
    live.wait_for_steps(5)


async def test_aborted_generations_are_sampled_again(
    live: Live, session: aiohttp.ClientSession
) -> None:
    for _ in range(20):
        assert (await post(session, *KIND.abort_all))[0] == 200
    live.wait_for_steps()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        POST + b"Host: 127.0.0.1\r\n",
        POST + b"Host: 127.0.0.1\r\nX-Slow: ",
        POST + b"Host: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{",
        POST + b"Host: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
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
    status, said = await post(session, KIND.generate, KIND.posts[KIND.generate])
    assert status == 200 and re.search(r'_ids": ?\[\d', said), said
    live.wait_for_steps()
    for peer in peers:
        peer.close()


HOST_LINES = [
    GET + b"Host: 127.0.0.1\r\nHost: evil.example\r\n",
    GET.replace(b"/", b"http://evil.example/", 1) + b"Host: evil.example\r\n",
    GET + b"Host: 127.0.0.1@evil.example\r\n",
    GET + b"Host: 127.0.0.1.evil.example\r\n",
    GET + b"Host: [::1\r\n",
    GET + b"Host: \r\n",
    GET,
]
ORIGIN_LINES = [
    GET + b"Host: 127.0.0.1\r\nOrigin: null\r\n",
    GET + b"Host: 127.0.0.1\r\norigin:\r\n",
    GET + b"Host: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\n",
]


@pytest.mark.parametrize("line", ORIGIN_LINES + (HOST_LINES if KIND.checks_host else []))
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


def test_server_has_the_weights_of_the_trainer_after_all_requests(live: Live) -> None:
    begin = live.step()
    is_measured = lambda: max(live.steps_with(MISMATCH), default=0) > begin  # noqa: E731
    until(is_measured, what=f"{MISMATCH} after step {begin}", seconds=SLOW_S)
    assert live.metrics(MISMATCH)[-1] <= TOLERANCE
