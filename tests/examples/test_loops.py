"""The one-process loops learn their task, and tokens have their versions."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import ENVIRONMENT, SLOW_S
from tests.examples.conftest import EXAMPLES, LIMIT_S

pytestmark = [pytest.mark.examples, pytest.mark.timeout(2 * LIMIT_S)]
STEP = re.compile(r"step +(\d+)  reward ([\d.]+)  staleness (\d+)  interrupted +(\d+) ")


def run(name: str, folder: Path) -> tuple[float, float, list[tuple[str, ...]]]:
    """Run an example in a folder; return the shares of right answers and the printed steps."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = re.findall(r"right answers (?:before|after) training: ([\d.]+)", done.stdout)
    return float(first), float(last), STEP.findall(done.stdout)


def test_rl_loop_learns_the_task_with_staleness_0(tmp_path: Path) -> None:
    before, after, steps = run("rl_loop", tmp_path)
    assert before < 0.4 and after >= 0.7
    assert [int(step) for step, *_ in steps] == [*range(80)]
    assert {(staleness, interrupted) for _, _, staleness, interrupted in steps} == {("0", "0")}


def test_async_loop_learns_the_task_within_its_staleness_bound(tmp_path: Path) -> None:
    before, after, steps = run("async_loop", tmp_path)
    assert before < 0.4 and after > before + 0.2
    assert len(steps) == 80 and all(int(staleness) <= 2 for _, _, staleness, _ in steps)


@pytest.fixture
def async_loop() -> Iterator[ModuleType]:
    """Import the example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("async_loop")
    sys.path.remove(str(EXAMPLES))


def test_new_weights_interrupt_generations_which_then_continue(
    async_loop: ModuleType, kit: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third pass of the decoder waits until the pause is queued, so the order is forced."""
    sampler = async_loop.AsyncSampler(str(kit("sorting") / "model"))
    reached, proceed, passes = threading.Event(), threading.Event(), iter(range(1000))
    decode = sampler.decoder.decode

    def decode_and_wait() -> None:
        if next(passes) == 3:
            reached.set()
            assert proceed.wait(SLOW_S)
        decode()

    monkeypatch.setattr(sampler.decoder, "decode", decode_and_wait)
    requests = [sampler.request(digits) for digits in ("531426", "998877")]
    for request in requests:
        request.stops = frozenset()  # each answer has MAX_NEW_TOKENS tokens
    sampler.engine.call(sampler.engine.submit, *requests)
    assert reached.wait(SLOW_S)
    paused = sampler.engine.call(sampler.engine.pause, "retract")
    proceed.set()
    paused.result(SLOW_S)
    sampler.load(_Weights(sampler.model), version=1)
    samples = sampler.collect(requests)
    sampler.engine.close()
    for sample in samples:
        versions = np.frombuffer(sample.segment.versions, np.int32)
        sampled = versions[versions >= 0].tolist()
        assert sampled == [0] * 5 + [1] * 3  # one prefill and four decode steps, then the rest


class _Weights:
    """Streams the weights of a model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def stream_weights(self) -> Iterator[tuple[str, object]]:
        """Yield the tensors of the model by name."""
        yield from self.model.state_dict().items()
