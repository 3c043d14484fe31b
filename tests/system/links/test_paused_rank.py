"""A rank that was paused uses the messages that arrived meanwhile."""

from __future__ import annotations

import time
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from arealite.api.trainer_messages import Done, EvalResult, Finish, ToTrainer
from arealite.system.links import trainer_link, wire
from arealite.system.links.trainer_link import TrainerLink


class Answers:
    """A socket with queued answers."""

    def __init__(self, *answers: ToTrainer) -> None:
        self.left = list(answers)

    def poll(self, _: int) -> bool:
        return bool(self.left)

    def recv_multipart(self) -> list[bytes]:
        return [wire.encode(self.left.pop(0))]

    def send(self, *_: Any) -> None:
        pass

    def close(self, *, linger: int) -> None:
        self.left.clear()


def connected(*answers: ToTrainer) -> TrainerLink:
    link: Any = TrainerLink(resolve=lambda: None, rank=0, world_size=1)
    link._socket = Answers(*answers)
    return link


@pytest.mark.parametrize("held_s", [3.0, 100.0])
def test_late_read_still_returns_the_answer(monkeypatch: pytest.MonkeyPatch, held_s: float) -> None:
    """The answer must not be dropped with the connection: an ended datapipe sends no other."""
    held = chain([0.0], repeat(held_s))  # from the first clock read on
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(held), sleep=time.sleep)
    link = connected(Done(request="Finish"))
    monkeypatch.setattr(trainer_link, "time", clock)
    link.report(Finish(reason="over"))


def test_duplicate_evaluation_answer_is_not_taken_for_the_next() -> None:
    """The datapipe answers twice if a request is resent while its answer is in transit."""
    first, second = (
        EvalResult(eval_id=0, metrics={"eval/reward": 0.5}),
        EvalResult(eval_id=1, metrics={"eval/reward": 1.0}),
    )
    link = connected(first, first, second)
    link.evaluate(0)
    link.evaluate(1)
    assert [link.eval_result(wait=True) for _ in range(3)] == [first, second, None]
