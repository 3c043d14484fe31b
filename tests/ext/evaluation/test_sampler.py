"""The driver of eval and collect: each sample runs once; failures are counted, not scored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from arealite.api.llm import LLMRequest, LLMResponse
from arealite.api.task import Task
from arealite.base.errors import GenerationRefused, RoleError, UserError
from arealite.ext.diagnosis import stacks
from arealite.ext.evaluation import sampler as task_sampler
from arealite.ext.evaluation.sampler import Sampler
from arealite.ext.evaluation.samples import Samples
from arealite.impl.rollout.collector import Collector
from arealite.system.ledger import group as open_group
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, tokenizer
from tests.impl.rollout import worlds
from tests.waiting import eventually

assert worlds is not None


@pytest.fixture(autouse=True)
def no_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_group, "BACK_OFF_S", 0.0)


@pytest.fixture
def samples(tmp_path: Path) -> Iterator[Samples]:
    made = Samples(tmp_path / "samples.sqlite")
    yield made
    made.close()


class Run:
    """A sampler with scripted answers that records its requests."""

    def __init__(self, samples: Samples, script=lambda request: response([10]), **ppo) -> None:
        config = experiment("world", concurrency=4)
        trainer = replace(config.trainer, ppo=replace(config.trainer.ppo, **ppo))
        config = replace(config, trainer=trainer)
        self.client, self.told = ScriptedClient(script), list[tuple[int, int]]()
        self.collector = Collector(config, self.client, tokenizer())
        self.sampler = Sampler(
            config=config,
            collector=self.collector,
            samples=samples,
            split="eval-0",
            progress=lambda done, all_: self.told.append((done, all_)),
        )

    async def go(self, tasks: list[Task], n: int) -> None:
        await self.collector.setup()
        try:
            await self.sampler.run(tasks, n)
        finally:
            await self.collector.close()

    @property
    def asked(self) -> Counter[str]:
        return Counter(request.request_id.split("/")[1] for request in self.client.requests)


def tasks(*prompts: str) -> list[Task]:
    return [
        Task(task_id=f"eval-{row}", prompt=prompt, ground_truth=None, extra_info={})
        for row, prompt in enumerate(prompts)
    ]


async def test_next_run_generates_only_missing_samples(samples) -> None:
    run = Run(samples)
    await run.go(tasks("a", "b", "c"), 3)
    assert samples.done() == {(task, member) for task in range(3) for member in range(3)}
    assert len(run.client.requests) == 9
    assert run.told[-1] == (9, 9)
    assert run.client.requests[0].sampling.temperature == 0.0, "as evaluations are drawn"
    again = Run(samples)
    await again.go(tasks("a", "b", "c"), 4)
    assert again.asked == {"3": 3}
    assert not run.sampler.failed and not again.sampler.failed


async def test_number_of_concurrent_episodes_is_bounded(samples) -> None:
    run = Run(samples)
    run.client.gate.clear()
    running = asyncio.ensure_future(run.go(tasks("a"), 9))
    await run.client.received(4)
    assert len(run.client.requests) == 4
    run.client.gate.set()
    await running
    assert len(samples.done()) == 9


async def test_failed_episode_is_retried_and_counted(samples) -> None:
    failed = set[str]()

    def script(request: LLMRequest) -> LLMResponse | Exception:
        if request.group_id not in failed:
            failed.add(request.group_id)
            return GenerationRefused("busy")
        return response([10])

    run = Run(samples, script)
    await run.go(tasks("a", "b"), 2)
    assert len(samples.done()) == 4
    assert samples.failures() == {"generation_refused": (2, "GenerationRefused: busy")}


async def test_sample_that_fails_every_attempt_has_no_score(samples) -> None:
    run = Run(samples, max_attempts=3)
    await run.go(tasks("a", "crash"), 2)
    assert samples.done() == {(0, 0), (0, 1)}
    assert run.sampler.failed == {"": 2}
    assert samples.failures()["error:KeyError"][0] == 6
    again = Run(samples, max_attempts=1)
    await again.go(tasks("a", "crash"), 2)
    assert len(again.client.requests) == 2, "only the failed ones, once more"


async def test_sampler_stops_if_most_episodes_fail(samples, monkeypatch) -> None:
    monkeypatch.setattr(task_sampler, "FAILURE_WINDOW", 8)
    run = Run(samples)
    with pytest.raises(ExceptionGroup) as raised:
        await run.go(tasks(*["crash"] * 40), 1)
    assert raised.group_contains(RoleError, match="The first: error:KeyError: KeyError: 'lost'")
    assert len(run.client.requests) < 20


async def test_user_error_stops_the_sampler(samples) -> None:
    run = Run(samples, lambda request: UserError("no such thing"))
    with pytest.raises(ExceptionGroup) as raised:
        await run.go(tasks("a"), 9)
    assert raised.group_contains(UserError, match="no such thing")


async def test_cancelled_sampler_keeps_finished_samples(samples) -> None:
    run = Run(samples)
    answered = 0

    def script(_: LLMRequest) -> LLMResponse:
        nonlocal answered
        answered += 1
        if answered == 6:
            run.client.gate.clear()
        return response([10])

    run.client.script = script
    running = asyncio.ensure_future(run.go(tasks("a", "b", "c"), 4))
    await run.client.received(10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    kept = samples.done()
    assert 6 <= len(kept) < 12
    again = Run(samples)
    await again.go(tasks("a", "b", "c"), 4)
    assert len(again.client.requests) == 12 - len(kept)
    assert len(samples.done()) == 12


@pytest.mark.parametrize("what", ["stubborn once", "turned"])
async def test_cancelled_sampler_starts_no_episode_if_an_environment_swallows_the_cancellation(
    samples, what
) -> None:
    run = Run(samples)
    running = asyncio.ensure_future(run.go(tasks(*[what] * 12), 1))
    paths = lambda: [stacks.task_path(task) for task in asyncio.all_tasks()]  # noqa: E731
    await eventually(lambda: sum("worlds.py" in path for path in paths()) == 4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await running
    assert len(run.client.requests) == 4
    assert not samples.failures()


async def test_leftover_cancellation_of_an_environment_does_not_cancel_later_episodes(
    samples,
) -> None:
    """Before Python 3.13, a task in which a TaskGroup failed keeps its cancellation count."""
    run = Run(samples, max_attempts=1)
    await run.go(tasks(*["group"] * 4, *["cancelled wait"] * 4, *"abcd"), 1)
    assert samples.done() == {(task, 0) for task in range(8, 12)}
    assert run.sampler.failed.total() == 8
