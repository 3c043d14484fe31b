"""The contract of `ServerProtocol` and `ServerControl`, which every kind of server keeps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arealite.api.llm import LLMRequest, SamplingConfig
from arealite.api.server_protocol import part_of_entry
from arealite.base import entries
from arealite.base.model_folder import read_shapes
from arealite.ext.embedded.weight_loading import load_model
from arealite.ext.gateway.answer_stream import TokenStream
from arealite.impl.client import answer_checks
from arealite.impl.client.top_tokens import num_requested, top_record
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
WITH_MODEL = KINDS[2:]
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
            hold_file = vllm.hold_folder / "generate"
            settings = {
                "headers": {"Authorization": f"Bearer {vllm.token}"},
                "hold": hold_file.touch,
                "release": lambda: hold_file.unlink(missing_ok=True),
            }
            stack.callback(settings["release"])
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


async def test_request_that_names_a_missing_adapter_is_refused(kind: KindOfServer) -> None:
    description = await kind.describe(kind.protocol)
    assert description is not None and not description.serves_adapters
    assert not kind.control.can.names_adapters
    status, raw = await kind.send(request(2, adapter="policy-7"))
    assert kind.protocol.lacks_adapter(status, raw), (status, raw)
    status, raw = await kind.send(request(2, input_ids=[5] * 600))
    assert status == 400 and not kind.protocol.lacks_adapter(status, raw)


@pytest.mark.parametrize(("name", "fake"), [("sglang", FakeSGLang), ("vllm", FakeVLLM)])
async def test_server_that_was_started_with_adapters_says_so(
    name: str, fake: type[ScriptedServer], folders: list[str]
) -> None:
    async with fake() as server:
        server.adapters.max_rank = 8
        pool = Pool(60.0)
        kind = KindOfServer(address=server.url, name=name, folders=folders, pool=pool)
        description = await kind.describe(kind.protocol)
        pool.close()
        assert description is not None and description.serves_adapters


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


@torch.inference_mode()
def sampler_probs(
    model: Any, output: list[int], sampling: SamplingConfig, *, is_vllm: bool
) -> np.ndarray:
    """Return the probabilities with which each token of an output could be sampled [N, V].

    vLLM applies top_p to the tokens that top_k keeps, other servers to all.
    """
    ids = torch.tensor([PROMPT + output])
    logits_NV = model(ids).logits[0, len(PROMPT) - 1 : -1].double()
    probs_NV = (logits_NV / sampling.temperature).softmax(-1).numpy()
    order_NV = np.argsort(-probs_NV, axis=1)
    sorted_NV = np.take_along_axis(probs_NV, order_NV, axis=1)
    mass_N1 = sorted_NV[:, : sampling.top_k if is_vllm and sampling.top_k > 0 else None].sum(1)
    is_kept_NV = sorted_NV.cumsum(1) - sorted_NV <= sampling.top_p * mass_N1[:, None]
    is_kept_NV &= sorted_NV >= sampling.min_p * sorted_NV[:, :1]
    if sampling.top_k > 0:
        is_kept_NV[:, sampling.top_k :] = False
    np.put_along_axis(probs_NV, order_NV, sorted_NV * is_kept_NV, axis=1)
    return probs_NV / probs_NV.sum(1, keepdims=True)


@pytest.mark.parametrize("kind", WITH_MODEL, indirect=True)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_most_probable_tokens_are_those_that_could_be_sampled(
    kind: KindOfServer, is_stream: bool
) -> None:
    model = load_model(kind.folders[0], dtype="float32", device="cpu")[0]
    num_known = 0
    for options in (
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.4, "temperature": 0.6},
        {"min_p": 0.3},
        {"top_k": 3, "top_p": 0.9, "temperature": 1.4},
        {"top_k": 40},
    ):
        wanted = {"max_new_tokens": 20, "top_logprobs": 12, **options}
        sampling = SamplingConfig(**wanted)
        fields: dict[str, Any] = {"sampling": wanted, "num_top": num_requested(sampling, 64)}
        fields["rid"] = f"{options}~{is_stream}"  # SGLang aborts the id of a stream after its end
        if is_stream:
            llm_request = LLMRequest(
                request_id="r", group_id="g", input_ids=PROMPT, sampling=sampling
            )
            stream = TokenStream(llm_request, kind.protocol)
            sent = request(20, is_stream=True, **fields)
            _, rest = await kind.send(sent, stream.feed)
            stream.feed(rest)
            assert stream.failure is None and stream.answer is not None, stream.failure
            answer = stream.answer
        else:
            answer = await kind.generate(20, **fields)
        assert (len(answer.output_ids), answer.finish) == (20, "length"), options
        record = top_record(answer, sampling, None)
        ids_NK = np.frombuffer(record.ids, "<i4").reshape(20, 12)
        logprobs_NK = np.frombuffer(record.logprobs, "<f4").reshape(20, 12)
        is_vllm = kind.name == "vllm"
        probs_NV = sampler_probs(model, answer.output_ids, sampling, is_vllm=is_vllm)
        for i, (ids_K, logprobs_K) in enumerate(zip(ids_NK, logprobs_NK, strict=True)):
            if ids_K[0] < 0:  # only where the server cannot know, or the end is a tie
                assert sampling.truncates
                continue
            num_tokens = min(12, np.count_nonzero(probs_NV[i]))
            expected_K = np.sort(probs_NV[i])[::-1][:12]
            assert (ids_K >= 0).tolist() == [k < num_tokens for k in range(12)], options
            np.testing.assert_allclose(np.exp(logprobs_K), expected_K, atol=2e-5)
            of_ids_K = probs_NV[i][ids_K[:num_tokens]]
            np.testing.assert_allclose(of_ids_K, expected_K[:num_tokens], atol=2e-5)
            sampled = probs_NV[i][answer.output_ids[i]]
            assert np.exp(record.sampled_logprobs[i]) == pytest.approx(sampled, abs=2e-5)
            num_known += np.exp(logprobs_K).sum() > 1 - 1e-4
    assert num_known >= 75  # of the 100 with a set of at most 12 tokens in all


@pytest.mark.parametrize("kind", WITH_MODEL, indirect=True)
async def test_named_tokens_are_scored_at_each_place_or_refused(kind: KindOfServer) -> None:
    prompt = [5, 6, 7, 8, 9]
    target_ids = [[3, 60, 6], [9, 3, -1], [8, 8, 1], [-1, -1, 9]]
    sent = request(1, input_ids=prompt, scores_prompt=True, target_ids=target_ids)
    status, raw = await kind.send(sent)
    if kind.name == "vllm":  # its runner for CPUs cannot; this message is the request's error
        assert status == 400 and "V2 model runner" in error_message(status, raw)
        return
    assert status == 200, raw
    llm_request = LLMRequest(
        request_id="r",
        group_id="g",
        input_ids=prompt,
        sampling=SamplingConfig(max_new_tokens=1),
        scores_prompt=True,
        target_ids=target_ids,
    )
    answer = kind.protocol.decode_answer(raw)
    scores_TK = np.frombuffer(answer_checks.target_logprobs(answer, llm_request), "<f4")
    model = load_model(kind.folders[0], dtype="float32", device="cpu")[0]
    with torch.inference_mode():
        logprobs_TV = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1).numpy()
    for row, (ids, scores) in enumerate(zip(target_ids, scores_TK.reshape(4, 3), strict=True)):
        for token, logprob in zip(ids, scores, strict=True):
            expected = logprobs_TV[row, token] if token >= 0 else -np.inf
            assert logprob == pytest.approx(expected, abs=2e-5)
    scored_TK = answer_checks.prompt_logprobs(answer, llm_request)
    own = [logprobs_TV[row, token] for row, token in enumerate(prompt[1:])]
    assert scored_TK == pytest.approx(own, abs=2e-5)


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
