"""Segments contain every token of all turns exactly once and in place."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arealite.api.llm import LLMResponse
from arealite.api.trajectory import Segment, decode_segments, encode_segments
from arealite.api.turns import Turn
from arealite.impl.rollout.collector import make_segments

ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def turn(prompt: list[int], output: list[int], **settings) -> Turn:
    count = len(output)
    response = LLMResponse(
        output,
        [-0.25 * (1 + i) for i in range(count)],
        [settings.get("version", 1)] * count,
        "stop",
    )
    return Turn(prompt, response, settings.get("temperature", 1.0), settings.get("reward", 0.0))


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
    (segment,) = make_segments([turn([5, 6, 7], [8, 9], version=3, reward=0.5)])
    assert arrays(segment) == {
        "tokens": [5, 6, 7, 8, 9],
        "loss_mask": [0, 0, 0, 1, 1],
        "logprobs": [0, 0, 0, -0.25, -0.5],
        "versions": [-1, -1, -1, 3, 3],
        "rewards": [0, 0, 0, 0, 0.5],
    }


def test_extending_turns_are_one_segment() -> None:
    turns = [
        turn([5], [6, 7], reward=1.0, version=1),
        turn([5, 6, 7, 8], [9], reward=-1.0, version=2),
    ]
    (segment,) = make_segments(turns)
    found = arrays(segment)
    assert found["tokens"] == [5, 6, 7, 8, 9]
    assert found["loss_mask"] == [0, 1, 1, 0, 1]
    assert found["versions"] == [-1, 1, 1, -1, 2]
    assert found["rewards"] == [0, 0, 1.0, 0, -1.0]


def test_turn_that_rewrites_earlier_tokens_starts_a_segment() -> None:
    turns = [turn([5], [6, 7]), turn([5, 6], [7]), turn([5, 6, 7], [8], temperature=0.5)]
    segments = make_segments(turns)
    assert [len(segment.loss_mask) for segment in segments] == [3, 3, 4]
    assert [segment.temperature for segment in segments] == [1.0, 1.0, 0.5]


def test_empty_output_keeps_its_reward() -> None:
    (segment,) = make_segments([turn([5, 6], [], reward=2.0)])
    assert arrays(segment)["rewards"] == [0, 2.0]


tokens = st.lists(st.integers(0, 3), max_size=5)


@st.composite
def episodes(draw) -> list[Turn]:
    """Draw turns; some extend the previous turn, some repeat it, some do not extend it."""
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(tokens.filter(bool))
        if turns and draw(st.booleans()):
            last = turns[-1]
            prompt = last.input_ids + last.response.output_ids + draw(tokens)
        made = turn(
            prompt,
            draw(tokens.filter(bool)),
            temperature=draw(st.sampled_from([1.0, 0.5])),
            reward=draw(st.sampled_from([0.0, 1.0, -0.5])),
            version=draw(st.integers(0, 5)),
        )
        turns.append(made)
    return turns


@ANY_PACE
@given(episodes())
def test_every_turn_is_in_exactly_one_segment(turns: list[Turn]) -> None:
    segments = make_segments(turns)
    decoded = decode_segments(encode_segments(segments))
    assert decoded == segments
    found = [arrays(segment) for segment in segments]
    for one in found:
        assert len({len(values) for values in one.values()}) == 1
        for mask, logprob, version in zip(
            one["loss_mask"], one["logprobs"], one["versions"], strict=True
        ):
            assert (mask == 1) == (logprob != 0) == (version >= 0)
    sampled = [t for turn in turns for t in turn.response.output_ids]
    masked = [t for one in found for t, m in zip(one["tokens"], one["loss_mask"], strict=True) if m]
    assert masked == sampled
    assert sum(sum(one["rewards"]) for one in found) == sum(turn.reward for turn in turns)
    # Each turn's full sequence is a prefix of a segment: training uses the sampled context.
    wholes = [one["tokens"] for one in found]
    for one in turns:
        whole = one.input_ids + one.response.output_ids
        assert any(tokens[: len(whole)] == whole for tokens in wholes)


@ANY_PACE
@given(st.lists(tokens.filter(bool), min_size=1, max_size=8))
def test_conversation_is_one_segment(parts: list[list[int]]) -> None:
    turns: list[Turn] = []
    history: list[int] = [1]
    for part in parts:
        turns.append(turn(history, part))
        history = history + part + [2]
    segments = make_segments(turns)
    assert len(segments) == 1
    assert len(segments[0].loss_mask) == len(history) - 1
