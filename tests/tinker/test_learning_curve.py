"""One learning curve by three programs: the SDK, the session's own calls, and plain torch."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import arealite
from arealite.api.engine import LossInput, Sequence
from tests.tinker.clients.plan import (
    ADAM,
    LR,
    NUM_SAMPLES,
    NUM_STEPS,
    NUM_TOKENS,
    PROMPTS,
    RANK,
    SEED,
    reward_of,
    seed_of,
)
from tests.tinker.conftest import RunningService, serving

pytestmark = pytest.mark.tinker


def importance_sampling(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of −p/q · A over all tokens."""
    ratio = (batch.outputs["logprobs"] - batch.fields["logprobs"]).exp()
    loss = -(ratio * batch.fields["advantages"]).sum()
    return loss, {"loss": loss.detach()}


async def curve_of_calls(model: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the curve of the same loop, written with the calls of a session."""
    overrides = {
        "cluster.name_root": str(folder / "names"),
        "cluster.run_root": str(folder / "runs"),
        "optimizer.max_skipped_updates": 0,
    }
    steps = list[dict[str, Any]]()
    async with arealite.session(model, adapters=[], overrides=overrides) as session:
        await session.add_adapter("a", rank=RANK, alpha=32.0, targets=["all-linear"], seed=SEED)
        for step in range(NUM_STEPS):
            await session.publish(adapter="a")
            rows = list[Sequence]()
            answers = list[dict[str, Any]]()
            for number, prompt in enumerate(PROMPTS):
                group = list[arealite.Sample]()
                for member in range(NUM_SAMPLES):
                    group += await session.sample(
                        prompt,
                        max_tokens=NUM_TOKENS,
                        adapter="a",
                        seed=seed_of(step, number, member),
                    )
                rewards = [reward_of(sample.output_ids) for sample in group]
                mean = sum(rewards) / len(rewards)
                for sample, reward in zip(group, rewards, strict=True):
                    rows.append(row_of(sample, reward - mean))
                    answers.append(
                        {
                            "tokens": [*prompt, *sample.output_ids],
                            "num_prompt": len(prompt),
                            "logprobs": sample.logprobs,
                            "reward": reward,
                        }
                    )
            stats = await session.forward_backward(
                rows, importance_sampling, record_outputs={"logprobs": "now"}
            )
            await session.optim_step(LR, adapter="a", **options_of_adam())
            logprobs = [row.fields["now"][1:].tolist() for row in rows]
            steps.append({"answers": answers, "loss": stats["loss"], "logprobs": logprobs})
    return steps


def options_of_adam() -> dict[str, float]:
    """Return the SDK's options under the names of this library."""
    options = dict(ADAM)
    options["clip_grad_norm"] = options.pop("grad_clip_norm")
    return options


def row_of(sample: arealite.Sample, advantage: float) -> Sequence:
    """Return a row whose loss tokens are all but the first, with advantage 0 in the prompt."""
    tokens = np.array([*sample.prompt_ids, *sample.output_ids], np.int32)
    is_sampled = np.arange(len(tokens)) >= len(sample.prompt_ids)
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[is_sampled] = sample.logprobs
    return Sequence(
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) > 0,
        temperature=1.0,
        fields={
            "logprobs": logprobs,
            "advantages": np.where(is_sampled, advantage, 0.0).astype(np.float32),
        },
        adapter="a",
    )


def curve_of_torch(model: Path, adapter: Path, steps: list[dict[str, Any]]) -> list[float]:
    """Return the losses of plain torch and peft on the answers that the SDK has seen."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with warnings.catch_warnings(action="ignore"):  # peft uses deprecated names of transformers
        module = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    params = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        params,
        lr=LR,
        betas=(ADAM["beta1"], ADAM["beta2"]),
        eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )
    losses = list[float]()
    for step in steps:
        loss = torch.zeros(())
        for group in np.array_split(np.arange(len(step["answers"])), len(PROMPTS)):
            answers = [step["answers"][index] for index in group]
            mean = math.fsum(answer["reward"] for answer in answers) / len(answers)
            for answer in answers:
                tokens = torch.tensor([answer["tokens"]])
                logits = module(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
                logprobs = logits.gather(-1, tokens[:, 1:, None])[0, answer["num_prompt"] - 1 :, 0]
                ratio = (logprobs - torch.tensor(answer["logprobs"])).exp()
                loss = loss - (ratio * (answer["reward"] - mean)).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, ADAM["grad_clip_norm"])
        optimizer.step()
        losses.append(loss.item())
    return losses


async def test_curve_through_the_sdk_is_that_of_the_calls_bit_for_bit_and_that_of_torch(
    service: RunningService, tiny: Path, tmp_path: Path
) -> None:
    found = service.client("learning_curve", "org/tiny")
    expected = await curve_of_calls(tiny, tmp_path)

    assert found["steps"] == expected
    rewards = [np.mean([answer["reward"] for answer in step["answers"]]) for step in expected]
    assert max(rewards[-2:]) > rewards[0]

    losses = curve_of_torch(tiny, first_adapter(service, found), expected)
    assert losses == pytest.approx([step["loss"] for step in expected], rel=1e-3, abs=1e-4)


def first_adapter(service: RunningService, curve: dict[str, Any]) -> Path:
    """Return the folder of the adapter with which a curve begins."""
    model_id, _, name = curve["first"].removeprefix("tinker://").partition("/")
    (folder,) = service.folder.glob(f"runs/**/tenants/*/{model_id.replace(':', '-')}/{name}")
    return folder / "adapter"


def test_curve_of_two_ranks_is_that_of_torch(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path, "launcher.trainer_ranks=2") as service:
        curve = service.client("learning_curve", "org/tiny")
        steps = curve["steps"]
        losses = curve_of_torch(tiny, first_adapter(service, curve), steps)
    assert len(steps) == NUM_STEPS
    assert losses == pytest.approx([step["loss"] for step in steps], rel=1e-3, abs=1e-4)
