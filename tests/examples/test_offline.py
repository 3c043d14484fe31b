"""The examples without servers: sft, dpo, a reward model."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Finished
from tests.examples.conftest import LIMIT_S, Example

pytestmark = [pytest.mark.examples, pytest.mark.timeout(2 * LIMIT_S)]


def before_and_after(done: Finished, name: str) -> tuple[float, float]:
    """Return a metric of the held-out rows before and after training."""
    assert done.code == 0, done.shown + done.logs()
    told = [line[name] for line in done.metrics() if name in line]
    assert len(told) == 2, "an evaluation before the first step, and one after the last"
    return told[0], told[1]


def test_sft_lowers_the_loss(example: Example) -> None:
    begin, end = before_and_after(example("sft"), "eval/loss")
    assert end < 0.95 * begin


def test_dpo_raises_the_margin(example: Example) -> None:
    done = example("dpo")
    begin, end = before_and_after(done, "eval/margin")
    assert begin == pytest.approx(0, abs=1e-5), "it begins as its reference"
    assert end > 0.05
    assert before_and_after(done, "eval/accuracy")[1] > 0.6


def test_reward_model_lowers_the_loss(example: Example) -> None:
    done = example("reward_model")
    begin, end = before_and_after(done, "eval/loss")
    assert end < begin
    assert len(json.loads((done.paths.export / "config.json").read_text())["id2label"]) == 1
