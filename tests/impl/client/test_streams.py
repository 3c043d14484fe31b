"""Streamed generations: each token is passed on once, whatever happens to servers and weights."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.llm import LLMRequest, LLMResponse, SamplingConfig
from arealite.base.errors import GenerationRefused, InvariantError
from arealite.ext.gateway.answer_stream import TokenStream
from arealite.ext.sglang.sglang_protocol import SGLangProtocol
from arealite.impl.client import answer_checks
from tests.impl.client.conftest import request
from tests.impl.client.test_servers_client import expected
from tests.waiting import eventually

EIGHT = expected([10, 20, 30], 8)


class Told(list[list[int]]):
    """The pieces that were passed to `on_tokens`."""

    @property
    def ids(self) -> list[int]:
        return [token for piece in self for token in piece]

    async def until(self, count: int) -> None:
        """Wait until `count` tokens were passed on."""
        await eventually(lambda: len(self.ids) >= count, f"{count} tokens")


async def test_streamed_response_equals_the_unstreamed_one(site) -> None:
    told = Told()
    async with site({"version": "3"}) as s:
        streamed = await s.generate(on_tokens=told.append)
        assert streamed == await s.generate()
        assert [sent.is_stream for sent in s.servers[0].requests] == [True, False]
    assert told.ids == streamed.output_ids == EIGHT
    assert len(told) > 1


async def test_update_that_aborts_a_stream_continues_it(site) -> None:
    told = Told()
    async with site({"version": "1", "hold_after": 3}) as s:
        task = asyncio.create_task(s.generate(on_tokens=told.append))
        await told.until(3)
        await s.servers[0].push("2", "abort")
        response = await task
    assert told.ids == response.output_ids == EIGHT
    assert (response.versions, response.interruptions) == ([1] * 3 + [2] * 5, 1)


async def test_resumed_tokens_are_not_passed_on_again(site) -> None:
    told = Told()
    resumed = LLMResponse(
        output_ids=EIGHT[:3], logprobs=[-0.5] * 3, versions=[0] * 3, stop_reason="", interruptions=0
    )
    async with site() as s:
        response = await s.generate(on_tokens=told.append, resumed=resumed)
    assert told.ids == EIGHT[3:]
    assert response.output_ids == EIGHT


async def test_stream_cut_after_its_last_token_is_complete(site) -> None:
    """The connection breaks between the finish reason and the end of the stream."""
    told = Told()
    async with site({}, {}) as s:
        first, second = s.servers

        async def stream(http: Any, job: Any) -> None:
            async for _ in first.tokens(job):
                pass
            body = b"data: " + msgspec.json.encode(first.event(job, 0)) + b"\n\n"
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            http.transport.write(head + b"%x\r\n%b\r\n" % (len(body), body))
            http.transport.close()

        first._stream = stream
        response = await s.generate(on_tokens=told.append)
        assert not second.requests
    assert told.ids == response.output_ids == EIGHT
    assert (response.stop_reason, response.interruptions) == ("length", 0)


async def test_refusal_as_an_event_raises_the_servers_message(site) -> None:
    async with site() as s:
        error = {"error": {"message": "the input is longer than the context", "code": 400}}
        s.servers[0].event = lambda job, sent: error
        with pytest.raises(GenerationRefused, match="HTTP 400: the input is longer"):
            await s.generate(on_tokens=Told().append)


async def test_error_of_on_tokens_is_raised_and_not_retried(site) -> None:
    def fail(ids: list[int]) -> None:
        raise UnicodeError("a bug of the caller")

    async with site() as s:
        with pytest.raises(UnicodeError, match="a bug of the caller"):
            await s.generate(on_tokens=fail)
        assert len(s.servers[0].requests) == 1


def events(ids: list[int], ends: list[int], *, disjoint: bool, queue: bool) -> list[bytes]:
    """Return the events of a stream of `ids` that ends an event after each index of `ends`.

    With `queue`, a last event is that of SGLang for a request that is aborted in the waiting queue:
    all logprobs, with the last id alone if the stream is disjoint.
    """
    made, before = [], 0
    for end in ends:
        start = before if disjoint else 0
        made.append(event(ids[start:end], ids[start:end], total=end))
        before = end
    if queue:
        shown = ids[before - 1 : before] if disjoint else ids[:before]
        made.append(event(shown, ids[:before], total=before, finish={"type": "abort"}))
    return [*made, b"data: [DONE]\n\n"]


def event(ids: list[int], logged: list[int], *, total: int, finish: Any = None) -> bytes:
    pairs = [[-token / 8, token, None] for token in logged]
    meta = {"finish_reason": finish, "completion_tokens": total, "output_token_logprobs": pairs}
    body = {"text": "", "output_ids": ids, "meta_info": meta | {"weight_version": "7"}}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.booleans(), st.data())
def test_stream_in_any_pieces_passes_each_token_on_once(ids, disjoint: bool, data: Any) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, len(ids)), min_size=1)))
    raw = b"".join(events(ids, ends, disjoint=disjoint, queue=data.draw(st.booleans())))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=9)))
    told = Told()
    stream = TokenStream(
        LLMRequest(
            request_id="r",
            group_id="g",
            input_ids=[1],
            sampling=SamplingConfig(),
            on_tokens=told.append,
        ),
        SGLangProtocol(),
    )
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        stream.feed(raw[begin:end])
    answer = stream.answer
    assert answer is not None
    assert told.ids == answer.output_ids == ids[: ends[-1]]
    assert answer.logprobs == [-token / 8 for token in told.ids]
    assert answer_checks.token_versions(answer, 0) == [7] * len(told.ids)


def test_stream_whose_logprobs_belong_to_other_tokens_is_refused() -> None:
    stream = TokenStream(request(on_tokens=Told().append), SGLangProtocol())
    stream.feed(event([1, 2], [1, 2], total=2))
    with pytest.raises(InvariantError, match="do not belong to them"):
        stream.feed(event([3], [4], total=3))
    with pytest.raises(InvariantError, match="returned 5 tokens and 3 logprobs"):
        stream.feed(event([3], [3], total=5))
