"""The oracle of exact tokens finds each kind of error in trajectories."""

from __future__ import annotations

from array import array
from dataclasses import replace

import msgspec
import pytest

from arealite.api.trajectory import Segment
from tests.fakes.scripted_tokens import Sampled, check, digest

FIRST = Sampled("e/agent/0", digest([1, 2]), [3, 4], [-0.5, -1.0], [7, 8], 1.0)
SECOND = Sampled("e/agent/1", digest([1, 2, 3, 4, 5]), [6], [-2.0], [9], 1.0)
RIGHT = Segment(
    tokens=array("i", [1, 2, 3, 4, 5, 6]).tobytes(),
    loss_mask=bytes([0, 0, 1, 1, 0, 1]),
    logprobs=array("f", [0, 0, -0.5, -1.0, 0, -2.0]).tobytes(),
    versions=array("i", [-1, -1, 7, 8, -1, 9]).tobytes(),
    rewards=bytes(24),
    temperature=1.0,
)


def changed(field: str, kind: str, at: int, value: float) -> Segment:
    """Return the segment with one other number."""
    numbers = array(kind, getattr(RIGHT, field))
    numbers[at] = int(value) if kind == "i" else value
    return msgspec.structs.replace(RIGHT, **{field: numbers.tobytes()})


def test_segment_as_sampled_has_no_error() -> None:
    verdict = check([FIRST, SECOND], [RIGHT])
    assert (verdict.tokens, verdict.trained, verdict.rows) == (3, 3, 1)
    assert (verdict.wrong, verdict.lost, verdict.doubled) == (0, 0, 0)


@pytest.mark.parametrize(
    ("segment", "wrong"),
    [
        (changed("tokens", "i", 3, 9), (3, 0, 0)),  # the second answer has another prefix, too
        (changed("tokens", "i", 0, 9), (3, 0, 0)),
        (changed("tokens", "i", 4, 9), (1, 0, 0)),
        (changed("logprobs", "f", 2, -0.25), (0, 1, 0)),
        (changed("versions", "i", 5, 8), (0, 0, 1)),
    ],
)
def test_changed_number_is_found(segment: Segment, wrong: tuple[int, int, int]) -> None:
    verdict = check([FIRST, SECOND], [segment])
    assert (verdict.wrong_tokens, verdict.wrong_logprobs, verdict.wrong_versions) == wrong


def test_lost_doubled_and_dropped_generations_are_found() -> None:
    assert check([FIRST, SECOND, replace(SECOND, request_id="e/agent/2")], [RIGHT]).lost == 1
    assert check([FIRST, SECOND], [RIGHT, RIGHT]).doubled == 2
    assert check([FIRST, SECOND], [RIGHT], dropped=["e/agent/1"]).doubled == 1
    assert check([FIRST, SECOND], [], dropped=["e/agent/0", "e/agent/1"]).lost == 0
