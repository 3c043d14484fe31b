"""Training calls: order, losses, failures that are never lost, and saved states."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import arealite
from arealite.api.engine import LossInput, Sequence
from arealite.base.errors import UserError
from tests.ext.session.conftest import Open
from tests.ext.session.own_losses import reinforce
from tests.waiting import eventually

PROMPT = "2+3="


def fail(batch: LossInput) -> torch.Tensor:
    raise ZeroDivisionError("no loss")


async def rows_of(session: arealite.Session) -> list[Sequence]:
    samples = await session.sample(PROMPT, n=4, max_tokens=6)
    return session.rows(samples, [1.0, 0.0, 0.0, 1.0])


def fingerprint(session: arealite.Session) -> str:
    return session._policy.engine.fingerprint()


# ------------------------------------------------------------ losses


async def test_own_loss_equals_the_same_loss_by_name(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        rows = await rows_of(session)
        session.forward_backward(rows, loss="reinforce")
        named = await session.optim_step(lr=0.0)
        stats = await session.forward_backward(rows, reinforce)
        own = await session.optim_step(lr=0.0)
        assert own["grad_norm"] == pytest.approx(named["grad_norm"], rel=1e-5)
        with_stats = await session.forward_backward(
            rows, lambda batch: (reinforce(batch), {"mine": torch.tensor(2.0)})
        )
    assert stats["tokens"] == sum(len(row.tokens) for row in rows)
    assert with_stats["mine"] == 2.0


async def test_default_weights_are_the_mean_over_the_tokens_of_the_call(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        rows = await rows_of(session)
        assert (await session.forward_backward(rows))["weight"] == pytest.approx(1.0)
        assert not any("loss_weight" in row.fields for row in rows)
        for row in rows:
            row.fields["loss_weight"] = np.full(len(row.tokens), 0.5, np.float32)
        stats = await session.forward_backward(rows)
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        assert stats["weight"] == pytest.approx(0.5 * num_tokens)


async def test_proximal_logprobs_are_those_before_the_first_update(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        rows = await rows_of(session)
        first = await session.forward_backward(rows, loss="ppo")
        session.optim_step(lr=0.3)
        second = await session.forward_backward(rows, loss="ppo")
        assert first["ratio"] == pytest.approx(1.0)
        assert abs(second["ratio"] - 1.0) > 1e-4
        before = await rows_of(session)
        session.forward(before, field="prox_logprobs")
        session.optim_step(lr=0.3)
        third = await session.forward_backward(before, loss="ppo")
        assert abs(third["ratio"] - 1.0) > 1e-6


async def test_preset_brings_its_options_and_its_reference(opened: Open) -> None:
    async with opened(lora=2) as parts:
        session = parts.session
        rows = await rows_of(session)
        first = await session.forward_backward(rows, loss="grpo")
        session.optim_step(lr=5.0)
        second = await session.forward_backward(await rows_of(session), loss="grpo")
        narrow = await session.forward_backward(rows, loss="gspo", eps_high=0.0)
    assert first["kl_ref"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl_ref"] > 1e-5
    assert "kl_ref" not in narrow


async def test_lora_trains_only_adapters(opened: Open) -> None:
    async with opened(lora=2) as parts:
        session = parts.session
        module = session._policy.engine.module  # type: ignore[attr-defined]
        trained = [name for name, param in module.named_parameters() if param.requires_grad]
        assert trained
        assert all("lora" in name for name in trained)
        await session.forward_backward(await rows_of(session), reinforce)
        assert (await session.optim_step(lr=1.0))["grad_norm"] > 0


async def test_parts_of_a_batch_add_up_to_the_gradient_of_the_whole(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        rows = await rows_of(session)
        for row in rows:
            row.fields["loss_weight"] = np.full(len(row.tokens), 0.1, np.float32)
        session.forward_backward(rows, reinforce)
        whole = await session.optim_step(lr=0.0)
        session.forward_backward(rows[:1], reinforce)
        session.forward_backward(rows[1:], reinforce)
        added = await session.optim_step(lr=0.0)
    assert added["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)


# ------------------------------------------------------------ failures


async def test_failed_call_raises_when_it_is_awaited_and_leaves_no_gradient(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        rows = await rows_of(session)
        session.forward_backward(rows, reinforce)
        expected = await session.optim_step(lr=0.0)
        session.forward_backward(rows, reinforce)
        with pytest.raises(ZeroDivisionError):
            await session.forward_backward(rows, fail)
        session.forward_backward(rows, reinforce)
        assert await session.optim_step(lr=0.0) == expected


async def test_calls_behind_a_failed_one_do_not_run_until_the_user_has_seen_it(
    opened: Open,
) -> None:
    async with opened() as parts:
        session = parts.session
        rows = await rows_of(session)
        before = fingerprint(session)
        session.forward_backward(rows, fail)
        session.forward_backward(rows, reinforce)
        session.optim_step(lr=1.0)
        with pytest.raises(ZeroDivisionError):
            await session.publish()
        assert fingerprint(session) == before
        session.forward_backward(rows, reinforce)
        await session.optim_step(lr=1.0)
        assert fingerprint(session) != before


async def test_failure_that_nobody_awaits_raises_at_the_next_call(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        rows = await rows_of(session)
        failed = session.forward_backward(rows, fail)
        await eventually(failed.done)
        with pytest.raises(ZeroDivisionError):
            session.sample(PROMPT)
        await session.sample(PROMPT, max_tokens=2)  # it is raised once


async def test_failure_of_a_call_whose_wait_was_given_up_is_not_lost(opened: Open) -> None:
    begun = threading.Event()
    proceed = threading.Event()

    def fail_later(batch: LossInput) -> torch.Tensor:
        begun.set()
        assert proceed.wait(60.0)
        raise ZeroDivisionError("no loss")

    with pytest.raises(ZeroDivisionError):
        async with opened() as parts:
            session = parts.session
            failed = session.forward_backward(await rows_of(session), fail_later)
            await asyncio.to_thread(begun.wait, 60.0)
            with pytest.raises(TimeoutError):
                failed.result(0.0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(failed, 0.01)
            proceed.set()


async def test_failure_that_nobody_awaits_raises_at_the_end_of_the_block(opened: Open) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened() as parts:
            parts.session.forward_backward(await rows_of(parts.session), fail)


async def test_error_of_the_block_wins_over_a_failed_call(opened: Open) -> None:
    with pytest.raises(KeyError):
        async with opened() as parts:
            parts.session.forward_backward(await rows_of(parts.session), fail)
            raise KeyError


async def test_all_engine_calls_of_a_block_end_before_the_block(
    opened: Open, tmp_path: Path
) -> None:
    async with opened() as parts:
        session = parts.session
        rows = await rows_of(session)
        for _ in range(3):
            session.forward_backward(rows, reinforce)
            session.optim_step(lr=0.1)
        session.save("last")
    assert (tmp_path / "runs/arealite/trial/checkpoints/last/manifest.json").exists()


async def test_update_without_a_gradient_is_refused(opened: Open) -> None:
    async with opened() as parts:
        with pytest.raises(UserError, match="there is no gradient"):
            await parts.session.optim_step(lr=0.1)


def without(name: str) -> Callable[[list[Sequence]], Any]:
    def change(rows: list[Sequence]) -> None:
        del rows[1].fields[name]

    return change


def nothing(rows: list[Sequence]) -> None:
    return


REFUSED_ROWS: list[tuple[Callable[[list[Sequence]], Any], dict[str, Any], str]] = [
    (list.clear, {}, "there are no rows"),
    (without("advantages"), {}, "row 1 has no field 'advantages', which the loss reads"),
    (without("versions"), {"loss": reinforce}, "row 1 has no field 'versions', which other"),
    (nothing, {"loss": "no_such"}, "Unknown preset 'algo/no_such'"),
    (nothing, {"loss": "ppo", "eps": 1}, "there is no option 'eps'. Options: objective"),
    (nothing, {"loss": "ppo", "eps_low": -1}, "forward_backward: eps_low=-1"),
    (nothing, {"loss": "sapo", "dual_clip": 2.0}, "dual_clip requires objective=ppo"),
    (nothing, {"loss": reinforce, "eps_low": 1}, "eps_low: a function has no options"),
    (nothing, {"loss": "rloo"}, "adds a KL penalty to rewards"),
    (nothing, {"loss": "m2po"}, "m2_threshold masks tokens of a whole batch"),
    (nothing, {"loss": "centering"}, "no field 'behav_top_logprobs'"),
]


async def test_wrong_arguments_of_forward_backward_are_refused(opened: Open) -> None:
    async with opened() as parts:
        for change, arguments, error in REFUSED_ROWS:
            rows = await rows_of(parts.session)
            change(rows)
            with pytest.raises(UserError, match=error):
                await parts.session.forward_backward(rows, **arguments)


async def test_other_wrong_arguments_are_refused_at_once(opened: Open) -> None:
    async with opened() as parts:
        session = parts.session
        samples = await session.sample(PROMPT, n=2, max_tokens=2)
        for call, error in (
            (lambda: session.rows(samples, [1.0]), "2 samples, but 1 rewards"),
            (lambda: session.rows(samples, [1.0, 0.0], advantage="gae"), "not relative"),
            (
                lambda: session.rows(samples, [1.0, 0.0], advantage="x"),
                "Unknown advantage type 'x'",
            ),
            (lambda: session.rows(samples, [1.0, 0.0], epsilon=1), "no option 'epsilon'"),
            (lambda: session.optim_step(lr=-1.0), "lr=-1.0: use a number of at least 0"),
            (lambda: session.save("../x"), "use letters"),
            (lambda: session.load(""), "use letters"),
        ):
            with pytest.raises(UserError, match=error):
                call()
        with pytest.raises(UserError, match=r"missing' does not exist\. Good ones"):
            await session.load("missing")


async def test_samples_without_a_reward_get_no_row(opened: Open) -> None:
    async with opened() as parts:
        samples = await parts.session.sample(PROMPT, n=3, max_tokens=2)
        rows = parts.session.rows(samples, [1.0, None, 0.0], advantage="dr_grpo")
    assert [float(row.fields["advantages"][0]) for row in rows] == [0.5, -0.5]


# ------------------------------------------------------------ states


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
async def test_loaded_state_continues_bit_for_bit(optimizer: str, opened: Open) -> None:
    async with opened(overrides={"optimizer.type": optimizer}) as parts:
        session = parts.session
        rows = await rows_of(session)
        session.forward_backward(rows, reinforce)
        session.optim_step(lr=0.01)
        folder = await session.save("middle")
        session.forward_backward(rows, reinforce)
        await session.optim_step(lr=0.01)
        expected = fingerprint(session)
        session.load("middle")
        session.forward_backward(rows, reinforce)
        await session.optim_step(lr=0.01)
        assert fingerprint(session) == expected
    assert folder.name == "middle"
    async with opened(overrides={"optimizer.type": optimizer}) as parts:
        session = parts.session
        session.load("middle")
        session.forward_backward(rows, reinforce)
        await session.optim_step(lr=0.01)
        assert fingerprint(session) == expected


async def test_exported_model_is_the_trained_one(
    opened: Open, tmp_path: Path, options: dict[str, Any]
) -> None:
    async with opened(lora=2) as parts:
        session = parts.session
        rows = await rows_of(session)
        session.forward_backward(rows, reinforce)
        session.optim_step(lr=1.0)
        expected = await session.forward(rows)
        await session.export(tmp_path / "export")
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    tokens_1T = torch.from_numpy(rows[0].tokens.astype(np.int64))[None]
    logits_TV = plain(tokens_1T).logits[0]
    logprobs_TV = torch.log_softmax(logits_TV, -1)
    index = int(rows[0].loss_mask.argmax())
    found = float(logprobs_TV[index - 1, tokens_1T[0, index]].detach())
    assert found == pytest.approx(float(expected[0][index]), abs=1e-4)
