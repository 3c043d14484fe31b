"""The contract of `ServerProtocol` and `ServerControl`, which every kind of server keeps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from arealite.api.llm import LLMRequest, SamplingConfig
from arealite.api.server_protocol import part_of_entry
from arealite.base import entries
from arealite.base.model_folder import read_shapes
from arealite.ext.gateway.answer_stream import TokenStream
from arealite.impl.client import answer_checks
from arealite.impl.http_client import Pool, error_message
from arealite.impl.publisher.control import FAILURES
from tests.contracts.kinds import LONG, PROMPT, KindOfServer, request
from tests.fakes.embedded import Brake, embedded
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.sglang import FakeSGLang
from tests.fakes.vllm import FakeVLLM

KINDS = [
    *("fake sglang", "fake vllm", "embedded"),
    pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.sglang_short]),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(1000)]),
]
FAKES: dict[str, type[ScriptedServer]] = {"fake sglang": FakeSGLang, "fake vllm": FakeVLLM}
EACH_MODE = pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])


@pytest.fixture(params=KINDS)
async def kind(request: pytest.FixtureRequest, folders: list[str]) -> AsyncIterator[KindOfServer]:
    """Return a server in its initial state, new or reset, to which a publisher is connected."""
    name = "sglang"
    settings: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        if request.param in FAKES:
            fake = await stack.enter_async_context(
                FAKES[request.param](context_length=512, vocab_size=64, next_token=lambda ids: 9)
            )
            address = fake.url
            name = request.param.removeprefix("fake ")
            settings = {"hold": lambda: setattr(fake, "hold_after", 3), "release": fake.release}
        elif request.param == "embedded":
            instance = await stack.enter_async_context(embedded(folders[0]))
            address = instance.address
            brake = Brake(instance.engine)
            settings = {"hold": brake.block, "release": brake.release}
        elif request.param == "sglang":
            sglang = request.getfixturevalue("sglang_server")
            address = sglang.address
            folders = sglang.folders
        else:
            vllm = request.getfixturevalue("vllm_server")
            address = vllm.real.address
            name = "vllm"
            folders = [str(folder) for folder in vllm.folders]
            settings = {"headers": {"Authorization": f"Bearer {vllm.token}"}}
        pool = Pool(60.0)
        stack.callback(pool.close)
        server = KindOfServer(address=address, name=name, folders=folders, pool=pool, **settings)
        await server.control.connect(read_shapes(Path(folders[0])))
        yield server


async def test_description_is_read_by_the_protocol_of_its_kind_only(kind: KindOfServer) -> None:
    description = await kind.describe(kind.protocol)
    assert description is not None
    assert (description.version, description.dtype) == ("default", "float32")
    assert description.context_length is not None and description.context_length >= 500
    for name in {*entries.own("server_protocol")} - {kind.name}:
        entry = {"address": kind.address, "protocol": name}
        assert await kind.describe(part_of_entry("server_protocol", entry)()) is None


async def test_answer_has_a_logprob_and_a_version_of_each_token(kind: KindOfServer) -> None:
    answer = await kind.generate(6)
    assert len(answer.output_ids) == len(answer.logprobs) == answer.num_tokens == 6
    assert all(logprob <= 0 for logprob in answer.logprobs)
    assert answer_checks.token_versions(answer, -1) == [0] * 6
    assert (answer.finish, answer.is_refusal, answer.num_retractions) == ("length", False, 0)


async def test_stop_token_is_in_the_output(kind: KindOfServer) -> None:
    sampling = {"stop_token_ids": [*range(64)]}
    answer = await kind.generate(20, sampling=sampling, ignore_eos=False)
    assert (len(answer.output_ids), answer.finish) == (1, "stop")


async def test_earlier_tokens_count_towards_the_budget(kind: KindOfServer) -> None:
    answer = await kind.generate(6, input_ids=[*PROMPT, 9, 9], num_sampled=2)
    assert len(answer.output_ids) == 4


async def test_invalid_request_is_refused_and_the_server_continues(kind: KindOfServer) -> None:
    for fields in ({"input_ids": [5] * 600}, {"sampling": {"temperature": -1.0}}):
        status, raw = await kind.send(request(2, **fields))
        assert status == 400
        assert len(error_message(status, raw)) > len("HTTP 400: ")
    assert len((await kind.generate(2)).output_ids) == 2


async def test_stream_passes_each_token_on_once(kind: KindOfServer) -> None:
    told: list[list[int]] = []
    llm_request = LLMRequest(
        request_id="r",
        group_id="g",
        input_ids=PROMPT,
        sampling=SamplingConfig(max_new_tokens=30),
        on_tokens=told.append,
    )
    stream = TokenStream(llm_request, kind.protocol)
    status, rest = await kind.send(request(30, is_stream=True), stream.feed)
    stream.feed(rest)
    answer = stream.answer
    assert status == 200 and stream.failure is None and answer is not None
    assert [token for piece in told for token in piece] == answer.output_ids
    assert len(answer.output_ids) == len(answer.logprobs) == 30
    assert (len(told) > 1, answer.finish) == (True, "length")
    assert answer_checks.token_versions(answer, -1) == [0] * 30


async def test_abort_ends_one_generation_with_its_tokens(kind: KindOfServer) -> None:
    running = await kind.begun("mine~0")
    status, raw = await kind.post(*kind.protocol.abort_request("mine~0"))
    assert status == 200, raw
    kind.release()
    answer = await running
    assert answer.finish == "abort"
    assert len(answer.output_ids) == len(answer.logprobs) < LONG
    assert len((await kind.generate(2)).output_ids) == 2


@EACH_MODE
async def test_update_changes_the_version_of_later_tokens_alone(
    kind: KindOfServer, mode: str
) -> None:
    running = await kind.begun("r~1")
    await kind.update(mode, kind.folders[1], 7)
    answer = await running
    versions = answer_checks.token_versions(answer, -1)
    assert versions == sorted(versions)
    if mode == "abort":
        assert answer.finish == "abort" and {*versions} <= {0}
    else:
        assert answer.finish == "length"
        assert {*versions} == {0, 7}
    assert await kind.version() == "7"
    later = await kind.generate(3)
    assert answer_checks.token_versions(later, -1) == [7] * 3


async def test_pause_is_reported_until_the_server_continues(kind: KindOfServer) -> None:
    assert await kind.control.reports_pause() is False
    await kind.control.pause("abort")
    assert await kind.control.reports_pause() is True
    await kind.control.resume()
    assert await kind.control.reports_pause() is False


async def test_label_is_changed_without_new_weights(kind: KindOfServer) -> None:
    await kind.control.relabel("-1", abort=False)
    assert await kind.version() == "-1"
    answer = await kind.generate(2)
    assert answer_checks.token_versions(answer, 9) == [-1, -1]


async def test_folder_without_weights_is_refused_and_the_server_continues(
    kind: KindOfServer, tmp_path: Path
) -> None:
    await kind.control.pause("retract")
    with pytest.raises(FAILURES):
        await kind.control.load_folder(tmp_path / "nowhere", 8)
    await kind.control.resume()
    assert await kind.version() == "default"
    assert answer_checks.token_versions(await kind.generate(3), -1) == [0] * 3
