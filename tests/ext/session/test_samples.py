"""Samples have the exact tokens, logprobs and versions, beside training and across updates."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

import arealite
from arealite.api.engine import LossInput
from arealite.base.errors import ContextOverflow, UserError
from tests.ext.session.conftest import Open
from tests.waiting import eventually

PROMPTS = ["2+3=", [5, 6, 7, 8], [{"role": "user", "content": "hello"}]]
EXACT = 1e-4


def difference(samples: list[arealite.Sample], logprobs: list[np.ndarray]) -> float:
    """Return the largest difference of samples to logprobs of the trained model."""
    differences = list[float]()
    for sample, logprobs_T in zip(samples, logprobs, strict=True):
        output_N = logprobs_T[len(sample.prompt_ids) :]
        differences.append(float(np.abs(output_N - sample.logprobs).max()))
    return max(differences)


async def test_samples_are_exact_and_in_the_order_of_their_prompts(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        samples = await session.sample(PROMPTS, n=3, max_tokens=9, temperature=0.8)
        rows = [sample.row(0.5) for sample in samples]
        assert difference(samples, await session.forward(rows)) < EXACT
        one = await session.sample("2+3=", max_tokens=2)
    assert len(samples) == 9
    assert len({sample.group for sample in samples}) == 3
    assert [sample.group == samples[0].group for sample in samples] == [True] * 3 + [False] * 6
    assert [sample.prompt for sample in samples[::3]] == PROMPTS
    assert samples[3].prompt_ids == [5, 6, 7, 8]
    assert len(samples[8].prompt_ids) > len("hello")
    assert [sample.prompt_ids for sample in one] == [samples[0].prompt_ids]
    for sample, row in zip(samples, rows, strict=True):
        assert len(sample.output_ids) == len(sample.logprobs) == len(sample.versions) <= 9
        assert set(sample.versions) == {0}
        assert sample.stop_reason in ("stop", "length")
        assert row.tokens.tolist() == sample.prompt_ids + sample.output_ids
        assert row.tokens.dtype == np.int32
        assert int(row.loss_mask.sum()) == len(sample.output_ids)
        assert not row.loss_mask[: len(sample.prompt_ids)].any()
        assert row.temperature == 0.8
        assert set(row.fields["advantages"]) == {0.5}
        assert row.fields["versions"][row.loss_mask].tolist() == sample.versions


async def test_update_interrupts_answers_which_continue_exactly_under_both_versions(
    opened: Open,
) -> None:
    async with opened() as parts:
        session = parts.session
        await session.save("old")
        rows = [sample.row() for sample in await session.sample(PROMPTS, max_tokens=8)]
        parts.brake.block()
        sampling = session.sample([5, 6, 7], n=8, max_tokens=120)
        await eventually(lambda: parts.num_open() == 8)
        session.forward_backward(rows, loss="reinforce")
        session.optim_step(lr=0.5)
        publishing = session.publish()
        parts.brake.release()
        assert (await publishing).version == session.version == 1
        samples = await sampling
        new = await session.forward([sample.row() for sample in samples])
        session.load("old")
        old = await session.forward([sample.row() for sample in samples])
    assert any(len(set(sample.versions)) == 2 for sample in samples)
    for sample, new_T, old_T in zip(samples, new, old, strict=True):
        versions_N = np.array(sample.versions)
        assert versions_N.tolist() == sorted(versions_N)
        output = slice(len(sample.prompt_ids), None)
        expected_N = np.where(versions_N == 0, old_T[output], new_T[output])
        np.testing.assert_allclose(sample.logprobs, expected_N, atol=EXACT)
    both = np.abs(np.concatenate(new) - np.concatenate(old))
    assert both.max() > 0.01  # the two versions differ


async def test_sampling_and_training_overlap(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        samples = await session.sample(PROMPTS, n=2, max_tokens=8)
        rows = [sample.row() for sample in samples]
        parts.brake.block(free=2)
        sampling = session.sample(PROMPTS, max_tokens=8)
        session.forward_backward(rows)
        assert (await session.optim_step(lr=0.1))["lr"] == 0.1
        assert not sampling.done()  # an update was applied during these generations
        parts.brake.release()
        await sampling

        begun = threading.Event()
        proceed = threading.Event()

        def slow_loss(batch: LossInput) -> torch.Tensor:
            begun.set()
            assert proceed.wait(60.0)
            return -(batch.outputs["logprobs"] * batch.fields["loss_weight"]).sum()

        training = session.forward_backward(rows, slow_loss)
        await asyncio.to_thread(begun.wait, 60.0)
        assert len(await session.sample(PROMPTS, n=2, max_tokens=8)) == 6
        assert not training.done()  # these answers were sampled during a backward pass
        proceed.set()
        await training


async def test_samples_after_a_publish_have_its_version(opened: Open) -> None:
    async with opened(lora=2) as parts:
        session = parts.session
        for version in (1, 2):
            samples = await session.sample(PROMPTS, n=2, max_tokens=6)
            session.forward_backward([sample.row() for sample in samples], loss="reinforce")
            session.optim_step(lr=1.0)
            report = await session.publish()
            assert report.version == session.version == version
            samples = await session.sample(PROMPTS, n=2, max_tokens=6)
            assert {v for sample in samples for v in sample.versions} == {version}
            rows = [sample.row() for sample in samples]
            assert difference(samples, await session.forward(rows)) < EXACT


async def test_cancelled_sample_aborts_its_requests_at_the_server(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        parts.brake.block(free=2)
        sampling = session.sample(PROMPTS, n=2, max_tokens=400)
        waiting = asyncio.ensure_future(_result(sampling))
        await eventually(lambda: parts.num_open() == 6)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        parts.brake.release()
        await eventually(lambda: not parts.num_open())
        assert len(await session.sample(PROMPTS, max_tokens=2)) == 3


async def _result(call: arealite.Call[Any]) -> Any:
    return await call


async def test_batches_are_sampled_ahead_within_the_staleness_bound(opened: Open) -> None:
    drawn = list[int]()

    def draw() -> Any:
        for number in range(6):
            drawn.append(number)
            yield [[5 + number]]

    async with opened(max_staleness=2) as parts:
        session = parts.session
        ages = list[int]()
        first_tokens = list[int]()
        async for samples in session.batches(draw(), n=2, max_tokens=3):
            assert len(drawn) == min(6, len(ages) + 3)  # this batch and the next two
            first_tokens.append(samples[0].prompt_ids[0])
            ages.append(session.version - min(min(sample.versions) for sample in samples))
            await session.forward_backward(session.rows(samples, [1.0, 0.0]), loss="ppo")
            session.optim_step(lr=0.01)
            await session.publish()
    assert first_tokens == [5, 6, 7, 8, 9, 10]
    assert max(ages) <= 2


async def test_rows_older_than_max_staleness_are_refused_by_name(opened: Open) -> None:
    async with opened(max_staleness=1) as parts:
        session = parts.session
        fresh = await session.sample("2+3=", max_tokens=3)
        await session.publish()
        session.forward_backward([fresh[0].row()])
        await session.publish()
        newer = await session.sample("2+3=", max_tokens=3)
        refused = "row 1 has tokens of version 0, and the weights have version 2: max_staleness=1"
        with pytest.raises(UserError, match=refused):
            session.forward_backward([newer[0].row(), fresh[0].row()])


async def test_prompt_beyond_the_context_fails_when_it_is_awaited(opened: Open) -> None:
    async with opened() as parts:
        long = await parts.session.sample("2", max_tokens=2)
        with pytest.raises(ContextOverflow):
            await parts.session.sample([5] * 100_000, max_tokens=2)
        assert len(long) == 1


REFUSED_SAMPLES: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "there are no prompts"),
    ("", {}, "there are no prompts"),
    ([""], {}, "prompt 0 is ''"),
    (["1", []], {}, r"prompt 1 is \[\]"),
    ([3.5], {}, r"prompt 0 is 3\.5"),
    ("1", {"n": 0}, "n=0: use at least 1"),
    ("1", {"max_tokens": 0}, "sample: max_new_tokens=0"),
    ("1", {"temperatur": 1.0}, "there is no option 'temperatur'. Options: temperature"),
    ("1", {"top_p": 2.0}, "sample: top_p=2.0"),
    ("1", {"stop": 5}, "sample: stop"),
    ("1", {"top_p": 0.9}, "samples do not record which tokens could be sampled"),
    ("1", {"min_new_tokens": 2}, "samples do not record which tokens could be sampled"),
]


async def test_wrong_arguments_of_sample_are_refused_at_once(opened: Open) -> None:
    async with opened() as parts:
        for prompts, arguments, error in REFUSED_SAMPLES:
            with pytest.raises(UserError, match=error):
                parts.session.sample(prompts, **arguments)
