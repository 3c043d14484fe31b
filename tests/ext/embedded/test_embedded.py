"""The whole embedded server: HTTP, registry, ports, signals, disconnected clients."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from transformers import AutoTokenizer

from arealite.base.errors import RoleError, UserError
from arealite.ext.embedded import embedded_server as embedded_module
from arealite.ext.embedded import protocol
from arealite.ext.embedded import server_app as app_module
from arealite.ext.embedded.embedded_server import EmbeddedServer
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.embedded import Brake, embedded, running, server_config
from tests.models import tiny_model
from tests.waiting import eventually


@pytest.fixture
async def server(folders: list[Path]) -> AsyncIterator[EmbeddedServer]:
    async with embedded(folders[0], max_running_requests=8) as instance:
        yield instance


@pytest.fixture
async def session(server: EmbeddedServer) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.address, connector=connector) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(folders: list[Path]) -> AsyncIterator[aiohttp.ClientSession]:
    """Connect to one server of all tests whose requests leave it as it was."""
    async with (
        embedded(folders[0], max_running_requests=8) as instance,
        aiohttp.ClientSession(instance.address) as opened,
    ):
        yield opened


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, msgspec.json.decode(await response.read() or b"null")


async def generate(
    session: aiohttp.ClientSession, prompt: list[int], new: int, **sampling: Any
) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "ignore_eos": True} | sampling
    status, answer = await post(
        session, "/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True
    )
    assert status == 200, answer
    return answer


async def test_more_requests_than_rows_all_finish(session: aiohttp.ClientSession) -> None:
    lengths = [1 + 7 * i % 23 for i in range(40)]
    answers = await asyncio.gather(
        *(generate(session, [5, 6 + i % 3], n) for i, n in enumerate(lengths))
    )
    assert [len(a["output_ids"]) for a in answers] == lengths


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_weight_updates_lose_none_of_32_running_requests(
    server: EmbeddedServer, session: aiohttp.ClientSession, folders: list[Path], mode: str
) -> None:
    brake = Brake(server.engine)
    brake.block()
    tasks = [asyncio.ensure_future(generate(session, [5 + i], 50)) for i in range(32)]
    await until_loaded(session, running=8, waiting=24)
    for version in ("1", "2"):
        assert (await post(session, "/pause_generation", mode=mode))[0] == 200
        status, _ = await post(
            session,
            "/update_weights_from_disk",
            model_path=str(folders[int(version)]),
            weight_version=version,
            flush_cache=False,
        )
        assert status == 200
        await post(session, "/continue_generation")
    brake.release()
    answers = await asyncio.gather(*tasks)
    assert all(len(a["output_ids"]) == 50 for a in answers)
    assert all(a["meta_info"]["finish_reason"]["type"] == "length" for a in answers)
    seen = {s["version"] for a in answers for s in a["meta_info"]["weight_versions"]}
    assert seen == {"default", "1", "2"}


async def until_loaded(session: aiohttp.ClientSession, *, running: int, waiting: int = 0) -> None:
    """Wait until the server has `running` and `waiting` requests."""
    async with asyncio.timeout(60):
        while True:
            load = await loads(session)
            if (load["num_running_reqs"], load["num_waiting_reqs"]) == (running, waiting):
                return


async def loads(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/v1/loads") as response:
        return (await response.json())["loads"][0]


async def test_stop_strings_cut_the_text_and_keep_the_tokens(
    session: aiohttp.ClientSession, folders: list[Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    whole = await generate(session, [5, 6], 60, temperature=0.0, skip_special_tokens=False)
    stop = tokenizer.decode(whole["output_ids"][4:6])
    options = {"temperature": 0.0, "skip_special_tokens": False, "stop": [stop, "never there"]}
    cut = await generate(session, [5, 6], 60, **options)
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    count = len(cut["output_ids"])
    assert cut["output_ids"] == whole["output_ids"][:count]
    assert stop in tokenizer.decode(cut["output_ids"])
    assert stop not in cut["text"]
    assert tokenizer.decode(cut["output_ids"]).startswith(cut["text"])
    kept = await generate(session, [5, 6], 60, no_stop_trim=True, **options)
    assert stop in kept["text"]


async def test_eos_stops_unless_ignored(session: aiohttp.ClientSession) -> None:
    sampling = {"max_new_tokens": 400}
    for i in range(4):
        body = {"input_ids": [5 + i], "sampling_params": sampling}
        _, answer = await post(session, "/generate", **body)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        assert answer["output_ids"][-1] == 2 and 2 not in answer["output_ids"][:-1]
        assert "output_token_logprobs" not in answer["meta_info"]


GOOD = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"{nonsense", "malformed"),
        (b"\xff\xfe", ""),
        (b"[1, 2]", "Expected `object`"),
        (b"", "Either text, input_ids"),
        (b'{"x": ' + b"[" * 40_000, "recursion"),
        (b'{"input_ids": [' + b"1" * 4_000 + b"]}", "Expected `int` <= 2147483647"),
        (b'{"input_ids": [5], "sampling_params": {"top_k": 9999999999}}', "Expected `int` <="),
        (b'{"input_ids": [5], "sampling_params": {"temperature": NaN}}', "malformed"),
        (b'{"input_ids": [5], "sampling_params": {"temperature": 1e999}}', "out of range"),
        ({"sampling_params": {"temperature": -0.5}}, "temperature must be a non-negative"),
        (
            {"sampling_params": {"top_p": -0.5}},
            "> 0.0 - at `$.sampling_params.top_p`",
        ),
        ({"sampling_params": {"top_k": -2}}, "Expected `int` >= -1 - at `$.sampling_params.top_k`"),
        ({"sampling_params": {"min_new_tokens": -1}}, ">= 0 - at `$.sampling_params.min_new_t"),
        (
            {"sampling_params": {"stop": ["a"] * 1025}},
            "<= 1024 - at `$.sampling_params.stop`",
        ),
        (
            {"sampling_params": {"stop_token_ids": [5] * 1025}},
            "<= 1024 - at `$.sampling_params.stop_t",
        ),
        ({"sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids must lie"),
        ({"input_ids": "abc"}, "Expected"),
        ({"input_ids": [[1], [2]]}, "Expected `int`, got `array`"),
        ({"input_ids": [1.5]}, "Expected"),
        ({"input_ids": []}, "takes input_ids only"),
        ({"input_ids": [-1]}, "input_ids must lie"),
        ({"input_ids": [64]}, "input_ids must lie"),
        ({"sampling_params": {"foo": 1}}, "unknown field `foo`, expected one of"),
        ({"sampling_params": {"max_new_tokens": "3"}}, "Expected `int"),
        ({"sampling_params": {"max_new_tokens": -1}}, ">= 0 - at `$.sampling_params.max_new_t"),
        (
            {"sampling_params": {"top_p": 1.5}},
            "<= 1.0 - at `$.sampling_params.top_p`",
        ),
        (
            {"sampling_params": {"top_p": 0.0}},
            "> 0.0 - at `$.sampling_params.top_p`",
        ),
        ({"sampling_params": {"top_k": 0}}, "top_k must be"),
        ({"sampling_params": {"min_new_tokens": 500}}, "min_new_tokens must be"),
        ({"sampling_params": {"n": 2}}, "unknown field `n`, expected one of"),
        ({"sampling_params": {"stop_token_ids": [99]}}, "stop_token_ids must lie"),
        ({"sampling_params": {"regex": "a+"}}, "unknown field `regex`, expected one of"),
        ({"sampling_params": [{}, {}]}, "Expected `object | null`, got `array`"),
        ({"top_logprobs_num": 1025}, "Expected `int` <= 1024"),
        ({"sampling_params": {"min_p": 1.5}}, "<= 1.0 - at `$.sampling_params.min_p`"),
        ({"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len must be in [0, 2)"),
        ({"input_ids": None, "text": "1"}, "takes input_ids only"),
        ({"image_data": ["x.png"]}, "no images, videos or audio"),
    ],
)
async def test_invalid_generate_body_is_refused_with_the_reason(
    shared: aiohttp.ClientSession, raw: Any, text: str
) -> None:
    body = raw if isinstance(raw, bytes) else msgspec.json.encode(GOOD | raw)
    async with shared.post("/generate", data=body) as response:
        assert response.status == 400
        answer = msgspec.json.decode(await response.read())
    assert text in answer["error"]["message"]
    assert (await post(shared, "/generate", **GOOD))[0] == 200


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/generate", 2**16 + 512 * len("64, ")),
        ("/pause_generation", 2**16),
        ("/abort_request", 2**16),
        ("/update_weights_from_disk", 2**16),
        ("/init_weights_update_group", 2**16),
    ],
)
async def test_body_above_the_limit_of_its_route_gets_413(
    shared: aiohttp.ClientSession, path: str, most: int
) -> None:
    for size, statuses in ((most, (200, 400)), (most + 1, (413,))):
        async with shared.post(path, data=b" " * size) as response:
            assert response.status in statuses
            assert response.status != 413 or f"size {most} exceeded" in await response.text()
    assert (await post(shared, "/continue_generation"))[0] == 200
    assert (await post(shared, "/generate", **GOOD))[0] == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_prompt_of_full_context_length_with_long_stop_strings_is_accepted(
    shared: aiohttp.ClientSession,
) -> None:
    """The body has a space after each comma, as json.dumps writes it."""
    sampling = {"max_new_tokens": 1, "stop": ["never there" * 400] * 10}
    assert (await post(shared, "/generate", input_ids=[63] * 511, sampling_params=sampling))[
        0
    ] == 200


async def test_body_with_the_layout_of_all_tensors_is_within_the_limit(
    server: EmbeddedServer, session: aiohttp.ClientSession
) -> None:
    tensors = server.engine.decoder.model.state_dict()
    body = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": "g" * 2**16,
    }
    status, answer = await post(session, "/update_weights_from_distributed", **body)
    assert (status, "init_weights_update_group" in answer["message"]) == (400, True)


@pytest.mark.parametrize(
    "change",
    [
        {"master_port": 0},
        {"master_port": 2**16},
        {"world_size": 1},
        {"rank_offset": -1},
        {"master_address": "evil\x1b[2J"},
        {"master_address": "a" * 254},
    ],
)
async def test_invalid_group_is_refused_without_starting_a_thread(
    session: aiohttp.ClientSession, change: dict[str, Any]
) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    threads = threading.active_count()
    status, answer = await post(session, "/init_weights_update_group", **(body | change))
    assert (status, threading.active_count()) == (400, threads)
    assert f"$.{next(iter(change))}" in answer["message"]


async def test_long_answers_are_encoded_in_another_thread(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()
    plain = protocol.answer

    def answer(*args: Any, **options: Any) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return plain(*args, **options)

    monkeypatch.setattr(protocol, "answer", answer)
    monkeypatch.setattr(app_module, "LONG_ANSWER", 5)
    assert len((await generate(session, [5], 6))["output_ids"]) == 6
    assert len((await generate(session, [5], 5))["output_ids"]) == 5
    assert [name == "MainThread" for name in threads] == [False, True]


async def test_long_prompt_is_not_scored(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_SCORES", 3 * 64)
    body = {"return_logprob": True, "logprob_start_len": 0, **GOOD}
    assert (await post(session, "/generate", **(body | {"input_ids": [5] * 3})))[0] == 200
    status, answer = await post(session, "/generate", **(body | {"input_ids": [5] * 4}))
    assert (status, "at most 3 tokens" in answer["error"]["message"]) == (400, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_unknown_top_level_fields_are_ignored(shared: aiohttp.ClientSession) -> None:
    assert (await post(shared, "/generate", **GOOD, surprise=1))[0] == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_bad_admin_bodies_are_refused(shared: aiohttp.ClientSession) -> None:
    for path, body in [
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": "x", "load_format": "dummy"}),
        ("/pause_generation", {"mode": 3}),
        ("/abort_request", {"rid": 3}),
    ]:
        assert (await post(shared, path, **body))[0] == 400


async def test_request_is_aborted_when_its_client_disconnects(
    server: EmbeddedServer, session: aiohttp.ClientSession
) -> None:
    Brake(server.engine).block()  # the request cannot finish
    task = asyncio.ensure_future(generate(session, [5], 500))
    await until_loaded(session, running=1)
    task.cancel()
    await until_loaded(session, running=0)


async def test_paused_servers_are_healthy_but_not_ready(session: aiohttp.ClientSession) -> None:
    await post(session, "/pause_generation", mode="retract")
    for path, status in (("/health", 200), ("/ready", 503)):
        async with session.get(path) as response:
            assert response.status == status
    async with session.get("/v1/models") as response:
        assert (await response.json())["data"][0]["max_model_len"] == 512


async def test_paused_server_reports_paused_s(folders: list[Path], tmp_path: Path) -> None:
    config = server_config(folders[0], tmp_path)
    registry = NameRegistry.of(config)
    async with running(config) as server, aiohttp.ClientSession(server.address) as session:
        for mode in ("retract", "abort"):  # a second pause does not reset the time
            await post(session, "/pause_generation", mode=mode)
        server.engine._paused_at -= 3600.0
        for path in ("/model_info", "/server_info"):
            async with session.get(path) as response:
                assert 3600.0 <= (await response.json())["paused_s"] < 7200.0
        await eventually(
            lambda: (registry.list("llm_server")[0].value["paused_s"] or 0.0) >= 3600.0, "a name"
        )
        await post(session, "/continue_generation")
        async with session.get("/model_info") as response:
            assert (await response.json())["paused_s"] is None


async def test_registry_entry_has_the_fields_clients_need(
    folders: list[Path], tmp_path: Path
) -> None:
    config = server_config(folders[0], tmp_path, context_length=100)
    registry = NameRegistry.of(config)
    async with running(config) as server:
        (entry,) = registry.list("llm_server")
        assert entry.value == {
            "address": server.address,
            "type": "embedded",
            "model_path": str(folders[0]),
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 64,
            "context_length": 100,
            "dtype": "float32",
            "adapters": {},
            "paused_s": None,
            "version": "default",
            "load": {"running": 0, "waiting": 0, "capacity": 64},
            "host": "127.0.0.1",
            "pid": os.getpid(),
        }
        assert server.address.startswith("http://127.0.0.1:")
    assert registry.list("llm_server") == []


async def test_registry_entry_follows_the_version_and_keeps_model_path(
    folders: list[Path], tmp_path: Path
) -> None:
    """The folder of new weights is temporary, so model_path must stay the original folder."""
    config = server_config(folders[0], tmp_path)
    registry = NameRegistry.of(config)
    async with running(config) as server, aiohttp.ClientSession(server.address) as session:
        body = {"model_path": str(folders[1]), "weight_version": "5"}
        assert (await post(session, "/update_weights_from_disk", **body))[0] == 200
        value = await eventually(
            lambda: (v := registry.list("llm_server")[0].value)["version"] == "5" and v, "version 5"
        )
        assert value["model_path"] == str(folders[0])


async def test_new_version_is_registered_without_waiting_for_a_heartbeat(
    folders: list[Path], tmp_path: Path
) -> None:
    config = server_config(folders[0], tmp_path)
    object.__setattr__(config.cluster, "heartbeat_s", 600.0)
    registry = NameRegistry.of(config)
    async with running(config) as server, aiohttp.ClientSession(server.address) as session:
        body = {"model_path": str(folders[1]), "weight_version": "5"}
        assert (await post(session, "/update_weights_from_disk", **body))[0] == 200
        version = lambda: registry.list("llm_server")[0].value["version"]  # noqa: E731
        await eventually(lambda: version() == "5", "version 5")


async def test_port_in_use_is_a_user_error(folders: list[Path], tmp_path: Path) -> None:
    async with embedded(folders[0]) as first:
        port = int(first.address.rsplit(":", 1)[1])
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with running(server_config(folders[0], tmp_path, port=port)):
                pass


async def test_missing_model_and_too_long_context_are_refused_before_files_are_written(
    folders: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"no config\.json in it"):
        async with running(server_config(tmp_path / "nothing", tmp_path)):
            pass
    with pytest.raises(UserError, match="above the model's own 512"):
        async with running(server_config(folders[0], tmp_path, context_length=513)):
            pass
    assert not os.listdir(tmp_path)


async def test_context_beyond_the_short_factors_of_longrope_is_refused(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | factors
    path = tiny_model(
        tmp_path / "model",
        family="phi3",
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        rope_parameters=rope,
    )
    with pytest.raises(UserError, match="above the model's own 32"):
        async with running(server_config(path, tmp_path, context_length=33)):
            pass


async def test_sigterm_answers_running_requests_and_returns(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_module, "SHUTDOWN_S", 60.0)
    config = server_config(folders[0], tmp_path)
    server = EmbeddedServer(config)
    serving = asyncio.ensure_future(server.serve())
    async with asyncio.timeout(60):
        await server.ready.wait()
        Brake(server.engine).block()
        async with aiohttp.ClientSession(server.address) as session:
            flight = asyncio.ensure_future(generate(session, [5], 500))
            await until_loaded(session, running=1)
            os.kill(os.getpid(), signal.SIGTERM)
            answer = await flight
        await serving
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
    assert NameRegistry.of(config).list("llm_server") == []


async def test_server_exits_when_its_engine_crashes(folders: list[Path], tmp_path: Path) -> None:
    server = EmbeddedServer(server_config(folders[0], tmp_path))
    serving = asyncio.ensure_future(server.serve())
    async with asyncio.timeout(60):
        await server.ready.wait()
        server.stop(MemoryError("no more"))
        with pytest.raises(RoleError, match="the engine crashed: no more"):
            await serving


STREAM = {"input_ids": [5], "stream": True, "return_logprob": True}


async def test_stream_has_disjoint_events_and_the_text_at_the_end(
    server: EmbeddedServer, session: aiohttp.ClientSession, folders: list[Path]
) -> None:
    brake = Brake(server.engine)
    brake.block()
    sampling = {"max_new_tokens": 21, "ignore_eos": True, "stream_interval": 8}
    async with session.post("/generate", json=STREAM | {"sampling_params": sampling}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        first = await response.content.readuntil(b"\n\n")
        brake.release()
        rest = await response.content.read()
    *raw, done = (first + rest).removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    events = [msgspec.json.decode(each.removeprefix(b"data: ")) for each in raw]
    metas = [event["meta_info"] for event in events]
    ids = [token for event in events for token in event["output_ids"]]
    assert [pair[1] for meta in metas for pair in meta["output_token_logprobs"]] == ids
    assert [meta["completion_tokens"] for meta in metas] == [
        sum(len(event["output_ids"]) for event in events[: i + 1]) for i in range(len(events))
    ]
    assert len(ids) == 21 and 1 < len(events) <= 5
    assert {str(meta["finish_reason"]) for meta in metas[:-1]} == {"None"}
    assert metas[-1]["finish_reason"] == {"type": "length", "length": 21}
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    texts = [event["text"] for event in events]
    assert texts == [""] * (len(events) - 1) + [tokenizer.decode(ids, skip_special_tokens=True)]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_events_of_a_stream_have_the_version_of_each_token(
    server: EmbeddedServer, session: aiohttp.ClientSession, folders: list[Path], mode: str
) -> None:
    brake = Brake(server.engine)
    brake.block(free=2)
    sampling = {"max_new_tokens": 100, "ignore_eos": True}
    async with session.post("/generate", json=STREAM | {"sampling_params": sampling}) as response:
        events = event_reader(response)
        first = await anext(events)
        await post(session, "/pause_generation", mode=mode)
        body = {"model_path": str(folders[1]), "weight_version": "1", "flush_cache": False}
        assert (await post(session, "/update_weights_from_disk", **body))[0] == 200
        await post(session, "/continue_generation")
        spans = [first["meta_info"]["weight_versions"]]
        while len(spans[-1]) < 2:  # each request lets the engine run a step
            await loads(session)
            await post(session, "/continue_generation")
            spans.append((await anext(events))["meta_info"]["weight_versions"])
        brake.release()
        *_, last = [event async for event in events]
    old = spans[-1][0]["end"]
    assert spans[-1] == [
        {"version": "default", "start": 0, "end": old},
        {"version": "1", "start": old, "end": spans[-1][1]["end"]},
    ]
    assert last["meta_info"]["weight_versions"] == [
        {"version": "default", "start": 0, "end": old},
        {"version": "1", "start": old, "end": 100},
    ]


async def event_reader(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the decoded events of a stream."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield msgspec.json.decode(line[6:])


async def test_stream_is_aborted_when_its_client_disconnects(
    server: EmbeddedServer, session: aiohttp.ClientSession
) -> None:
    Brake(server.engine).block(free=2)
    body = STREAM | {"sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    async with session.post("/generate", json=body) as response:
        await anext(event_reader(response))
        response.close()
    await until_loaded(session, running=0)


async def test_slow_reader_of_a_stream_gets_more_tokens_per_event(
    server: EmbeddedServer, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that waits for the reader delays neither the engine nor other requests."""
    write, writes, may_write = web.StreamResponse.write, asyncio.Event(), asyncio.Event()

    async def slow(self: Any, data: Any) -> None:
        writes.set()
        await may_write.wait()
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", slow)
    body = STREAM | {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    async with session.post("/generate", json=body) as response:
        await writes.wait()
        await until_loaded(session, running=0)
        assert len((await generate(session, [5], 6))["output_ids"]) == 6
        may_write.set()
        counts = [len(event["output_ids"]) async for event in event_reader(response)]
    assert sum(counts) == 200
    assert len(counts) <= 3


async def test_failed_step_ends_a_stream_with_an_error_event(
    server: EmbeddedServer, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.engine.decoder, "decode", fail)
    async with session.post("/generate", json=STREAM) as response:
        raw = await response.read()
    error = msgspec.json.decode(raw.split(b"\n\n")[-3].removeprefix(b"data: "))["error"]
    assert error == {"message": "RuntimeError: out of memory", "code": 500}
