"""Compare losses and gradients of the presets with TRL's GRPOTrainer on the same batch.

Both have the same weights, prompts, answers, advantages and old logprobs. Each computes its own
logprobs, entropies and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arealite.algo.losses import make_policy_loss
from arealite.algo.reduction import token_weights
from arealite.api.algorithm import KLConfig, LossConfig
from arealite.api.engine import LossFn, Sequence, Training
from arealite.api.engine_config import FSDPConfig, OptimizerConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.base import config as base_config
from arealite.impl.engine.fsdp import FSDPEngine
from tests.impl.engine.helpers import assert_close, weights

pytestmark = [pytest.mark.peers, pytest.mark.part, pytest.mark.filterwarnings("ignore")]
PRESETS = Path(__file__).parents[3] / "config/algo"
TEMPERATURE, LIMIT, LR = 0.7, 12, 1e3
PROMPTS, ANSWERS = (3, 7, 5, 6, 4, 9), (12, 2, 7, 1, 5, 12)
NO_CHANGE: dict[str, Any] = {}
# preset, changes of LossConfig, TRL's options
CASES = {
    "grpo": (
        "grpo",
        NO_CHANGE,
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "dr_grpo": ("dr_grpo", NO_CHANGE, {"loss_type": "dr_grpo"}),
    "dapo": ("dapo", NO_CHANGE, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        "gspo",
        NO_CHANGE,
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "gspo, wide": (
        "gspo",
        {"eps_low": 0.05, "eps_high": 0.03},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.03,
        },
    ),
    "cispo": ("cispo", {"eps_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    "sapo": ("sapo", NO_CHANGE, {"loss_type": "sapo"}),
    "dual clip": (
        "dapo",
        {"dual_clip": 1.3},
        {"loss_type": "dapo", "delta": 1.3, "epsilon_high": 0.28},
    ),
    "entropy": (
        "dapo",
        {"entropy_coef": 0.1},
        {"loss_type": "dapo", "entropy_coef": 0.1, "epsilon_high": 0.28},
    ),
}


class Batch:
    """Answers with advantages; the old policy's logprobs are close to the current policy's."""

    def __init__(self, model: Any) -> None:
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(3, 64, n) for n in PROMPTS]
        self.answers = [rng.integers(3, 64, n) for n in ANSWERS]
        self.advantages = rng.normal(0, 1, len(ANSWERS)).astype(np.float32)
        self.olds, self.refs = [], []
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            tokens = torch.from_numpy(np.concatenate([prompt, answer]))[None]
            with torch.no_grad():
                logits = model(tokens).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            logprobs = (
                logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()
            )
            shape = len(answer)
            self.olds.append((logprobs + rng.normal(0, 0.2, shape)).astype(np.float32))
            self.refs.append((logprobs + rng.normal(0, 0.5, shape)).astype(np.float32))

    def rows(self, reduction: str) -> list[Sequence]:
        """Return the rows for our engine."""
        given = token_weights(reduction, ANSWERS, divisor=LIMIT)
        rows = []
        for i, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            pad = np.zeros(len(prompt), np.float32)
            old = np.concatenate([pad, self.olds[i]])
            fields = {
                "prox_logprobs": old,
                "behav_logprobs": old,
                "ref_logprobs": np.concatenate([pad, self.refs[i]]),
                "advantages": np.full(len(tokens), self.advantages[i]),
                "loss_weight": np.full(len(tokens), given[i], np.float32),
            }
            rows.append(
                Sequence(tokens=tokens, loss_mask=mask, temperature=TEMPERATURE, fields=fields)
            )
        return rows

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the inputs for TRL: prompts padded on the left, answers on the right."""

        def stack(arrays: list[np.ndarray], width: int, *, left: bool = False) -> torch.Tensor:
            sides = [(width - len(a), 0) if left else (0, width - len(a)) for a in arrays]
            padded = [np.pad(a, side) for a, side in zip(arrays, sides, strict=True)]
            return torch.from_numpy(np.stack(padded))

        wide, long = max(PROMPTS), max(ANSWERS)
        ones = [np.ones(n, np.int64) for n in PROMPTS], [np.ones(n, np.int64) for n in ANSWERS]
        return {
            "prompt_ids": stack(self.prompts, wide, left=True),
            "prompt_mask": stack(ones[0], wide, left=True),
            "completion_ids": stack(self.answers, long),
            "completion_mask": stack(ones[1], long),
            "advantages": torch.from_numpy(self.advantages),
            "old_per_token_logps": stack(self.olds, long),
            "ref_per_token_logps": stack(self.refs, long),
            "num_items_in_batch": torch.tensor(float(sum(ANSWERS))),
        }


@pytest.fixture(scope="module")
def make_peer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that creates a GRPOTrainer of our tiny model."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    folder = tmp_path_factory.mktemp("trl")

    def make(**options: Any) -> Any:
        config = GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to=[],
            temperature=TEMPERATURE,
            max_completion_length=LIMIT,
            num_generations=2,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
            disable_dropout=True,
            **options,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["1", "2"]}),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        # The loop sets this before each step.
        trainer.current_gradient_accumulation_steps = 1
        trainer.args.steps_per_generation = 1
        trainer.model.train()
        return trainer

    yield make


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_match_trl(case: str, group: None, model: Path, make_peer: Any) -> None:
    preset, change, options = CASES[case]
    peer = make_peer(**options)
    batch = Batch(peer.model)
    theirs = peer.compute_loss(peer.model, batch.inputs())
    theirs.backward()
    expected = {name: p.grad for name, p in peer.model.named_parameters()}

    config = base_config.load(
        ExperimentConfig, base_config.read_layers([PRESETS / f"{preset}.yaml"], []), {}
    ).trainer.ppo
    loss = replace(config.loss, **change)
    ours, stats = gradients(model, batch.rows(loss.reduction), loss, config.kl)
    assert stats["loss"] == pytest.approx(float(theirs.detach()), rel=1e-5, abs=1e-6)
    assert_close(ours, expected, tolerance=1e-5)
    assert_moved(case, stats)


def assert_moved(case: str, stats: dict[str, float]) -> None:
    """Check that the batch exercises the case."""
    if case not in ("sapo", "grpo"):
        assert stats["clip_frac_high"] > 0
    if case == "grpo":
        assert stats["kl_ref"] > 0.01


def gradients(
    model: Path, rows: list[Sequence], loss: LossConfig, kl: KLConfig
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Take one step of plain SGD, large enough to make rounding of the weights negligible."""
    optimizer = OptimizerConfig(
        type="sgd", beta1=0.0, weight_decay=0.0, clip_grad_norm=0.0, warmup_steps=0
    )
    engine = FSDPEngine(
        FSDPConfig(max_tokens_per_microbatch=40),
        model_path=str(model),
        seed=0,
        training=Training(optimizer=optimizer, lr=LR, total_updates=1),
    )
    before = {name: tensor.clone() for name, tensor in weights(engine).items()}
    loss_fn: LossFn = make_policy_loss(loss, kl)
    stats = engine.train_batch(rows, loss_fn)
    assert stats["microbatches"] > 1
    after = weights(engine)
    return {name: (before[name] - after[name]) / LR for name in before}, stats
