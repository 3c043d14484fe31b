"""Segments contain every token of all turns exactly once and in place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arealite.api.episode import RECENT, EpisodeRecord
from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.trajectory import Segment
from arealite.api.turns import Origin, Turn
from arealite.impl.rollout.tree_maker import make_tree
from tests.payloads import decode_segments

ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Given(NamedTuple):
    """A turn to record."""

    prompt: list[int]
    output: list[int]
    reward: float = 0.0
    version: int = 1
    temperature: float = 1.0


def segments_of(*given: Given) -> list[Segment]:
    """Return the segments of turns that were sampled one after the other."""
    record = EpisodeRecord()
    for prompt, output, reward, version, temperature in given:
        turn = record.begin(prompt, SamplingConfig(temperature=temperature))
        turn.reward, count = reward, len(output)
        logprobs = [-0.25 * (1 + i) for i in range(count)]
        record.add(
            turn,
            LLMResponse(
                output_ids=output, logprobs=logprobs, versions=[version] * count, stop_reason="stop"
            ),
        )
    return make_tree(record.turns).segments()


def arrays(segment: Segment) -> dict[str, list]:
    kinds = {
        "tokens": "<i4",
        "loss_mask": "u1",
        "logprobs": "<f4",
        "versions": "<i4",
        "rewards": "<f4",
    }
    return {
        name: np.frombuffer(getattr(segment, name), kind).tolist() for name, kind in kinds.items()
    }


def test_one_turn_is_one_segment() -> None:
    (segment,) = segments_of(Given([5, 6, 7], [8, 9], version=3, reward=0.5))
    assert arrays(segment) == {
        "tokens": [5, 6, 7, 8, 9],
        "loss_mask": [0, 0, 0, 1, 1],
        "logprobs": [0, 0, 0, -0.25, -0.5],
        "versions": [-1, -1, -1, 3, 3],
        "rewards": [0, 0, 0, 0, 0.5],
    }


def test_extending_turns_are_one_segment() -> None:
    (segment,) = segments_of(
        Given([5], [6, 7], reward=1.0, version=1), Given([5, 6, 7, 8], [9], reward=-1.0, version=2)
    )
    found = arrays(segment)
    assert found["tokens"] == [5, 6, 7, 8, 9]
    assert found["loss_mask"] == [0, 1, 1, 0, 1]
    assert found["versions"] == [-1, 1, 1, -1, 2]
    assert found["rewards"] == [0, 0, 1.0, 0, -1.0]


def test_turn_that_rewrites_earlier_tokens_starts_a_segment() -> None:
    last = Given([5, 6, 7], [8], temperature=0.5)
    segments = segments_of(Given([5], [6, 7]), Given([5, 6], [7]), last)
    assert [len(segment.loss_mask) for segment in segments] == [3, 3, 4]
    assert [segment.temperature for segment in segments] == [1.0, 1.0, 0.5]


def test_empty_output_keeps_its_reward() -> None:
    (segment,) = segments_of(Given([5, 6], [], reward=2.0))
    assert arrays(segment)["rewards"] == [0, 2.0]


tokens = st.lists(st.integers(0, 2), max_size=4)
some = tokens.filter(bool)


class Sent(NamedTuple):
    """A request of a random session, and its answer."""

    prompt: list[int]
    turn: Turn


@st.composite
def sessions(draw) -> tuple[EpisodeRecord, list[Sent]]:
    """Draw a session: turns that extend any turn, retries, rewrites, concurrent and lost turns.

    The logprob of each sampled token is a number of its own.
    """
    record, sent, open_turns, numbers = (
        EpisodeRecord(),
        list[Sent](),
        list[Sent](),
        itertools.count(1),
    )
    for _ in range(draw(st.integers(1, 10))):
        prompt = draw(some)
        if sent:
            base, turn = draw(st.sampled_from(sent))
            kind = draw(st.sampled_from(["extend", "extend", "retry", "cut", "new"]))
            if kind == "extend":
                prompt = base + turn.response.output_ids + draw(tokens)
            elif kind == "retry":
                prompt = base
            elif kind == "cut":
                prompt = [*base[: draw(st.integers(0, len(base)))], *prompt]
        temperature = draw(st.sampled_from([1.0, 1.0, 1.0, 0.5]))
        sampling = SamplingConfig(temperature=temperature)
        open_turns.append(Sent(prompt[:], record.begin(prompt, sampling)))
        while open_turns and draw(st.integers(0, 2)):  # else it is concurrent with the next one
            ended = open_turns.pop(draw(st.integers(0, len(open_turns) - 1)))
            finish(record, ended.turn, draw(tokens), numbers, draw(st.integers(0, 3)))
            sent.append(ended)
    for ended in open_turns:
        finish(record, ended.turn, draw(some), numbers)
    sent += open_turns
    for lost in draw(st.lists(st.sampled_from(sent), max_size=2)):
        record.drop(lost.turn.response)
    return record, [each for each in sent if each.turn in record.turns]


def finish(
    record: EpisodeRecord, turn: Turn, ids: list[int], numbers: Iterator[int], version: int = 0
) -> None:
    """Add the answer of a turn to the record."""
    logprobs = [-float(next(numbers)) for _ in ids]
    turn.reward = 0.5
    record.add(
        turn,
        LLMResponse(
            output_ids=ids, logprobs=logprobs, versions=[version] * len(ids), stop_reason="stop"
        ),
    )


@ANY_PACE
@given(sessions())
def test_each_sampled_token_is_trained_once_under_the_prompt_that_was_sent(
    session: tuple[EpisodeRecord, list[Sent]],
) -> None:
    record, sent = session
    tree = make_tree(record.turns)
    segments = tree.segments()
    assert decode_segments(tree.encode()) == segments
    trained = list[tuple[list[int], int, float, int]]()
    for segment in segments:
        found = arrays(segment)
        assert len({len(values) for values in found.values()}) == 1
        names = ("loss_mask", "tokens", "logprobs", "versions")
        each = zip(*(found[name] for name in names), strict=True)
        for at, (mask, token, logprob, version) in enumerate(each):
            assert (mask == 1) == (logprob != 0) == (version >= 0)
            if mask:
                trained.append((found["tokens"][:at], token, logprob, version))
    expected = [
        (prompt + turn.response.output_ids[:at], token, logprob, version)
        for prompt, turn in sent
        for at, (token, logprob, version) in enumerate(
            zip(*msgspec.structs.astuple(turn.response)[:3], strict=True)
        )
    ]
    assert sorted(trained, key=lambda each: each[2]) == sorted(expected, key=lambda each: each[2])
    assert sum(sum(arrays(each)["rewards"]) for each in segments) == 0.5 * len(sent)
    assert [turn.input_ids for _, turn in sent] == [prompt for prompt, _ in sent]
    assert sum(len(segment.turns) for segment in segments) == len(sent)


def test_only_the_last_of_many_branches_keep_their_json() -> None:
    record, numbers, sampling = EpisodeRecord(), itertools.count(1), SamplingConfig()
    root = [*range(1000)]
    for at in range(3 * RECENT):
        finish(record, record.begin([*root, at], sampling), [7], numbers)
    kept = [turn for turn in record.turns if turn.json]
    assert kept == record.turns[-RECENT:]
    prompt = [*root, 0, 7, 8]
    for extends in (None, record.turns[0].response):
        turn = record.begin(prompt, sampling, None, extends)
        assert (turn.parent, turn.added) == (record.turns[0], b"\x08\0\0\0")
        assert json.loads(turn.json) == prompt
    other = record.begin(prompt, SamplingConfig(temperature=0.5))
    assert (other.prompt, other.added) == (turn.prompt, turn.raw_prompt)


def test_receipts_tell_where_the_tokens_of_a_prompt_come_from() -> None:
    record, numbers, sampling = EpisodeRecord(), itertools.count(1), SamplingConfig()
    for prompt, origin in [
        ([1, 2], None),
        ([1, 2, 7, 3], None),
        ([1, 2, 7, 4], None),
        ([1, 9], None),
        ([1, 2, 7, 3, 7, 5], Origin(reused=5, new=1)),
        ([1, 8], Origin(reused=1, new=1, reason="edited")),
    ]:
        finish(record, record.begin(prompt, sampling, origin), [7], numbers)
    made = [
        [
            (placed.start, placed.length, placed.node.reused, placed.node.reason)
            for placed in segment.turns
        ]
        for segment in make_tree(record.turns).segments()
    ]
    assert made == [
        [(4, 1, 3, "forked")],
        [(2, 1, 0, "rewritten")],
        [(2, 1, 0, "first"), (4, 1, 3, ""), (6, 1, 5, "")],
        [(2, 1, 1, "edited")],
    ]


def test_segment_continues_at_the_turn_before_a_dropped_one() -> None:
    record, numbers, sampling = EpisodeRecord(), itertools.count(1), SamplingConfig()
    finish(record, record.begin([1], sampling), [5], numbers)
    lost = record.begin([1, 5, 2], sampling)
    finish(record, lost, [6], numbers)
    finish(record, record.begin([1, 5, 3], sampling), [7], numbers)
    record.drop(lost.response)
    (segment,) = make_tree(record.turns).segments()
    assert arrays(segment)["tokens"] == [1, 5, 3, 7]
    assert arrays(segment)["loss_mask"] == [0, 1, 0, 1]


def test_long_session_is_one_segment_and_keeps_its_tokens_once() -> None:
    record, numbers, prompt = EpisodeRecord(), itertools.count(1), [1]
    for _ in range(2000):
        turn = record.begin(prompt, SamplingConfig())
        finish(record, turn, [5, 6], numbers)
        prompt = [*prompt, 5, 6, 7]
    assert sum(len(turn.added) // 4 for turn in record.turns) < len(prompt)
    assert [json.loads(turn.json) for turn in record.turns if turn.json] == [prompt[:-3]]
    (segment,) = make_tree(record.turns).segments()
    assert [placed.node.reused for placed in segment.turns[:3]] == [0, 3, 6]


@ANY_PACE
@given(st.lists(tokens.filter(bool), min_size=1, max_size=8))
def test_conversation_is_one_segment(parts: list[list[int]]) -> None:
    turns: list[Given] = []
    history: list[int] = [1]
    for part in parts:
        turns.append(Given(history, part))
        history = history + part + [2]
    segments = segments_of(*turns)
    assert len(segments) == 1
    assert len(segments[0].loss_mask) == len(history) - 1
