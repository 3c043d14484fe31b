"""Payload frames keep every byte of their segments, and have common tokens once."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api import payloads
from arealite.api.payloads import (
    REPEATED,
    decode_segments,
    drop_repeated_prompts,
    encode_segments,
    restore_prompts,
    split_prompt,
)
from arealite.api.trajectory import Segment


def segment(tokens: np.ndarray, sampled: int, **changes: bytes) -> Segment:
    """Make a segment whose last `sampled` tokens are trained."""
    rng = np.random.default_rng(len(tokens))
    mask = np.arange(len(tokens)) >= len(tokens) - sampled
    arrays = {
        "tokens": tokens.astype("<i4").tobytes(),
        "loss_mask": mask.astype(np.uint8).tobytes(),
        "logprobs": np.where(mask, rng.normal(size=len(mask)), 0).astype("<f4").tobytes(),
        "versions": np.where(mask, 3, -1).astype("<i4").tobytes(),
        "rewards": np.where(mask, 0.5, 0).astype("<f4").tobytes(),
    }
    return Segment(**(arrays | changes), temperature=1.0)


def episode(turns: int, seed: int = 0) -> list[Segment]:
    """Make the segments of an episode whose template drops the thoughts of earlier turns."""
    rng, made = np.random.default_rng(seed), list[Segment]()
    past = rng.integers(0, 9, 300)
    for _ in range(turns):
        thought, spoken = rng.integers(0, 9, 30), rng.integers(0, 9, 20)
        made.append(segment(np.concatenate([past, thought, spoken]), 50))
        past = np.concatenate([past, spoken])
    return made


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=6))
def test_payload_unpacks_into_the_same_segments(shapes: list[tuple[int, int]]) -> None:
    tokens = np.arange(80) % 3
    made = [segment(tokens[: shared + own], own) for shared, own in shapes]
    assert decode_segments(encode_segments(made)) == made


def test_common_tokens_are_in_the_payload_once() -> None:
    made = episode(20)
    payload = encode_segments(made)
    assert decode_segments(payload) == made
    assert len(payload) < 17 * (300 + 20 * 70) + 20 * 200
    assert len(payload) < len(msgspec.msgpack.encode(made)) / 5


def test_payload_of_an_older_version_is_read() -> None:
    made = episode(3)
    assert decode_segments(msgspec.msgpack.encode(made)) == made


@pytest.mark.parametrize("common", [1, 1 << 23])
def test_payload_that_shares_tokens_that_are_not_there_is_refused(common: int) -> None:
    first = msgspec.structs.replace(episode(1)[0], common=common)
    with pytest.raises(msgspec.MsgspecError, match="a segment leaves out"):
        decode_segments(msgspec.msgpack.encode([first]))


def test_small_payload_that_would_fill_the_memory_is_refused() -> None:
    first = segment(np.zeros(1 << 20), 0)
    rest = msgspec.structs.replace(segment(np.zeros(0), 0), common=1 << 20)
    with pytest.raises(msgspec.MsgspecError, match="leaves out 1048576 tokens"):
        decode_segments(msgspec.msgpack.encode([first, *[rest] * 1000]))


def test_trajectories_with_one_prompt_have_equal_heads() -> None:
    prompt, rng = np.arange(500), np.random.default_rng(0)
    answers = [np.concatenate([prompt, rng.integers(0, 9, size)]) for size in (3, 40, 300)]
    made = [encode_segments([segment(each, len(each) - 500)]) for each in answers]
    heads = {split_prompt(payload)[0] for payload in made}
    assert [head[5:] for head in heads] == [prompt.astype("<i4").tobytes()]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=8))
def test_prompts_that_a_message_leaves_out_are_restored(
    shapes: list[tuple[int, int, bool]],
) -> None:
    old = msgspec.msgpack.encode
    segments = [[segment(np.arange(4 * p + n), n)] for p, n, _ in shapes]
    pairs = zip(segments, shapes, strict=True)
    made = [old(each) if is_old else encode_segments(each) for each, (*_, is_old) in pairs]
    frames = drop_repeated_prompts(made)
    assert restore_prompts(frames) == made
    blocks = [split_prompt(payload)[0] for payload in made]
    for (before, after), frame in zip(pairwise(blocks), frames[1:], strict=True):
        assert (not after or before != after) or not split_prompt(frame)[0]


def test_message_of_payloads_of_an_older_version_is_unchanged() -> None:
    made = [msgspec.msgpack.encode(episode(turns)) for turns in (1, 2)]
    assert restore_prompts(drop_repeated_prompts(made)) == made


def test_small_message_that_would_fill_the_memory_is_not_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payloads, "MOST_BYTES", 1 << 20)
    first = encode_segments([segment(np.arange(1 << 16), 1)])
    restored = restore_prompts([first, *[REPEATED] * 1000])
    assert sum(map(len, restored)) < 2 << 20
    with pytest.raises(msgspec.MsgspecError):
        decode_segments(restored[-1])


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\xc1\xff\xff\xff\xff", b"\xc0"])
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_segments(payload)
