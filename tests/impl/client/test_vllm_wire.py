"""vLLM's routes: encoding, decoding, versions, load and description, without a server."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.llm import SamplingConfig
from arealite.api.server_protocol import GenerateRequest, ServerAnswer, ServerDescription
from arealite.base.errors import InvariantError, UserError
from arealite.ext.gateway.answer_stream import TokenStream
from arealite.ext.vllm.vllm_protocol import INFO_PATH, VLLMProtocol
from arealite.impl.client import answer_checks
from tests.impl.client.conftest import request
from tests.impl.client.test_streams import Told

SPANS = [{"version": "default", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
DESCRIPTION = {
    "/version": {"version": "0.32.0+cpu"},
    "/v1/models": {
        "data": [{"id": "m", "owned_by": "vllm", "root": "/models/m", "max_model_len": 2048}]
    },
    "/weight_info": {"weight_version": "7"},
    INFO_PATH: {
        "vllm_config": {
            "instance_id": "a1b2c",
            "model_config": {
                "dtype": "torch.bfloat16",
                "quantization": None,
                "logprobs_mode": "processed_logprobs",
            },
        }
    },
}


def choice(ids: list[int], **fields: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -token / 8, "rank": 1} for token in ids]
    defaults = {"index": 0, "token_ids": ids, "logprobs": {"content": content}}
    return defaults | {"finish_reason": None, "weight_versions": None} | fields


def encoded(*choices: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"request_id": "generate-tokens-a", "choices": choices})


def decoded(ids: list[int], **fields: Any) -> ServerAnswer:
    return VLLMProtocol().decode_answer(encoded(choice(ids, **fields)))


def sent(sampling: SamplingConfig, **fields: Any) -> dict[str, Any]:
    """Return the body of a request."""
    generate = GenerateRequest(rid="a~0", input_ids=[1, 2], sampling=sampling, **fields)
    return json.loads(VLLMProtocol().encode_request(generate))


def test_each_sampling_parameter_of_vllm_is_sent() -> None:
    """vLLM takes a parameter that is missing from generation_config.json of the model."""
    sampling = SamplingConfig(max_new_tokens=10, min_new_tokens=4, stop=["b"], stop_token_ids=[7])
    body = sent(sampling)
    assert (body["request_id"], body["token_ids"]) == ("a~0", [1, 2])
    assert body["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": 10,
        "min_tokens": 4,
        "stop": ["b"],
        "stop_token_ids": [7],
        "ignore_eos": False,
        "logprobs": 0,
        "detokenize": True,
    }


def test_rows_of_most_probable_tokens_are_asked_for_and_read() -> None:
    params = sent(SamplingConfig(min_p=0.1), num_top=3)["sampling_params"]
    assert (params["logprobs"], params["min_p"]) == (3, 0.1)
    tops = [(7, -0.9), (3, -0.5), (4, -9999.0)]  # the sampled token first; one that is not kept
    top_logprobs = [{"token_id": token, "logprob": logprob} for token, logprob in tops]
    content = [{"token_id": 7, "logprob": -0.9, "rank": 2, "top_logprobs": top_logprobs}]
    answer = decoded([7], logprobs={"content": content})
    assert answer.top_tokens == [[(-0.9, 7, None), (-0.5, 3, None)]]
    assert answer.is_renormalized


def test_budgets_shrink_by_the_tokens_that_earlier_answers_sampled() -> None:
    sampling = SamplingConfig(max_new_tokens=10, min_new_tokens=4, top_k=5, temperature=0.5)
    params = sent(sampling, num_sampled=6, ignore_eos=True)["sampling_params"]
    assert (params["max_tokens"], params["min_tokens"]) == (4, 0)
    assert (params["top_k"], params["temperature"], params["ignore_eos"]) == (5, 0.5, True)
    assert params["detokenize"] is False


def test_stream_and_routing_are_requested() -> None:
    body = sent(SamplingConfig(), is_stream=True, with_routing=True, routing_start=3)
    assert body["stream"] is True
    assert body["sampling_params"]["stream_interval"] > 1
    assert body["sampling_params"]["routed_experts_prompt_start"] == 3


def test_prompt_that_is_encoded_already_is_sent_as_it_is() -> None:
    generate = GenerateRequest(rid="a", input_ids=msgspec.Raw(b"[7, 8]"), sampling=SamplingConfig())
    assert b'"token_ids":[7, 8]' in VLLMProtocol().encode_request(generate)


def test_answer_has_tokens_logprobs_and_the_version_of_each_token() -> None:
    answer = decoded([4, 5], finish_reason="length", weight_versions=SPANS)
    assert (answer.output_ids, answer.logprobs) == ([4, 5], [-0.5, -0.625])
    assert (answer.finish, answer.newest_version, answer.num_tokens) == ("length", "2", 2)
    assert answer_checks.token_versions(answer, 9) == [0, 2]
    assert not answer.is_refusal


def test_event_of_a_stream_has_only_its_new_tokens() -> None:
    event = VLLMProtocol().decode_answer(encoded(choice([6])), 2)
    assert (event.output_ids, event.num_tokens, event.spans) == ([6], 3, [])
    assert event.newest_version is None


def test_aborted_answer_without_tokens_is_no_refusal() -> None:
    answer = decoded([], finish_reason="abort", logprobs=None)
    assert (answer.output_ids, answer.logprobs, answer.finish) == ([], [], "abort")
    assert not answer.is_refusal


def test_answer_without_choices_has_no_tokens() -> None:
    assert VLLMProtocol().decode_answer(encoded(), 3).num_tokens == 3


@pytest.mark.parametrize("raw", [b"{}", b"[]", b'{"choices": "many"}', b'{"error": {}}', b"oops"])
def test_body_that_is_no_answer_is_a_decode_error(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        VLLMProtocol().decode_answer(raw)


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        [{"token_id": 4, "logprob": -0.5}],
        [{"token_id": 5, "logprob": -0.5}, {"token_id": 4, "logprob": -0.5}],
        [{"token_id": 4, "logprob": -0.5}, {"token_id": 5, "logprob": -9999.0}],
    ],
    ids=["none", "empty", "short", "other order", "no logprob"],
)
def test_logprobs_that_mismatch_the_ids_raise_an_error(content: Any) -> None:
    with pytest.raises(InvariantError, match="logprobs"):
        decoded([4, 5], logprobs={"content": content})


def test_recorded_experts_are_read_from_an_npy_file() -> None:
    file = io.BytesIO()
    np.save(file, np.arange(12, dtype="u1").reshape(3, 2, 2))
    answer = decoded([4], routed_experts=b64encode(file.getvalue()).decode())
    assert answer.expert_ids is not None
    assert answer.expert_ids.tolist() == list(range(12))


def test_abort_names_the_id_that_vllm_gave_the_request() -> None:
    path, body = VLLMProtocol().abort_request("g/0~1")
    assert path == "/inference/v1/abort_requests"
    assert body == {"request_ids": ["generate-tokens-g/0~1"]}


def test_version_is_read_and_set() -> None:
    protocol = VLLMProtocol()
    assert protocol.read_version(b'{"weight_version": "7"}') == "7"
    assert protocol.read_version(b"{}") is None
    request_for_label = protocol.relabel_request("-1", abort=True)
    assert request_for_label == ("/update_weight_version", {"new_version": "-1"})


def test_load_is_the_sum_over_the_engines() -> None:
    metrics = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1e+01
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
"""
    assert VLLMProtocol().read_load(metrics) == {"running": 13, "waiting": 2, "capacity": 0}
    assert VLLMProtocol().read_load(b"# no gauges") is None


# ------------------------------------------------------------ description


def described(**changes: Any) -> ServerDescription | None:
    return VLLMProtocol().describe(DESCRIPTION | changes)


def test_description_of_a_server() -> None:
    assert described() == ServerDescription(
        model_path="/models/m",
        version="7",
        context_length=2048,
        start_id="a1b2c",
        dtype="bfloat16",
        quantization=None,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"/version": {}},
        {"/v1/models": {}},
        {"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}},
    ],
)
def test_server_of_another_kind_has_no_description(changes: dict[str, Any]) -> None:
    assert described(**changes) is None


def config_with(**model_config: Any) -> dict[str, Any]:
    return {INFO_PATH: {"vllm_config": {"instance_id": "a", "model_config": model_config}}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"/version": {"version": "0.31.1"}}, "vLLM 0.31.1.*Install vLLM 0.32 or newer"),
        ({"/weight_info": {}}, "without the routes for weights.*VLLM_SERVER_DEV_MODE=1"),
        ({INFO_PATH: {}}, "without the routes for weights.*--enable-scale-out"),
        (config_with(logprobs_mode="raw_logprobs"), "raw_logprobs.*processed_logprobs"),
        (config_with(), "with None, which are not"),
    ],
)
def test_server_that_cannot_be_used_is_refused_by_name(changes: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        described(**changes)


@pytest.mark.parametrize("version", ["0.32.0rc1", "0.40", "1.0", "dev"])
def test_newer_versions_are_accepted(version: str) -> None:
    assert described(**{"/version": {"version": version}})


# ------------------------------------------------------------ streams


def events(ids: list[int], ends: list[int]) -> bytes:
    """Return a stream of `ids` that ends an event after each index of `ends`."""
    raw = b""
    begin = 0
    for end in ends:
        fields: dict[str, Any] = {}
        if end == ends[-1]:
            spans = [{"version": "7", "start": 0, "end": end}]
            fields = {"finish_reason": "length", "weight_versions": spans}
        raw += b"data: " + encoded(choice(ids[begin:end], **fields)) + b"\n\n"
        begin = end
    return raw + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.data())
def test_stream_in_any_pieces_passes_each_token_on_once(ids: list[int], data: Any) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, len(ids)), min_size=1)))
    raw = events(ids, ends)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=9)))
    told = Told()
    stream = TokenStream(request(on_tokens=told.append), VLLMProtocol())
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        stream.feed(raw[begin:end])
    answer = stream.answer
    assert answer is not None
    assert told.ids == answer.output_ids == ids[: ends[-1]]
    assert answer.logprobs == [-token / 8 for token in told.ids]
    assert (answer.finish, answer_checks.token_versions(answer, 0)) == ("length", [7] * ends[-1])


def test_stream_whose_logprobs_belong_to_other_tokens_is_refused() -> None:
    stream = TokenStream(request(on_tokens=Told().append), VLLMProtocol())
    wrong = choice([3], logprobs={"content": [{"token_id": 4, "logprob": -1.0}]})
    with pytest.raises(InvariantError, match="do not belong to them"):
        stream.feed(b"data: " + encoded(wrong) + b"\n\n")
