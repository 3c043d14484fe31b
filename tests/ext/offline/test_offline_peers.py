"""Compare loss and gradient of SFT, DPO and the reward model with TRL on the same rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.trainer import trainers
from arealite.ext.offline.config import DPOConfig
from arealite.ext.offline.offline_trainer import OfflineTrainer
from tests.ext.offline.test_offline import settings
from tests.models import tiny_model
from tests.system.data.test_dataset import jsonl

pytestmark = [
    pytest.mark.peers,
    pytest.mark.part,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]

TOLERANCE = 1e-5


def rows(kind: str) -> list[dict[str, str]]:
    """Draw rows of many lengths. Rows of the reward model have prompt and answer in one column."""
    rng = random.Random(3)

    def text(longest: int) -> str:
        return "".join(rng.choices("0123456789abcdef +-*/=", k=rng.randint(1, longest)))

    made = []
    for _ in range(9):
        prompt, chosen, rejected = text(12), text(20), text(20)
        if kind == "sft":
            made.append({"prompt": prompt, "completion": chosen})
        else:
            made.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return made


def ours(config: ExperimentConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of the first batch, and the gradient that its update would apply."""
    trainer: Any = trainers.get(config.trainer.type)(config)  # type: ignore[call-arg]
    assert isinstance(trainer, OfflineTrainer)
    engine: Any = trainer.engine
    found: dict[str, torch.Tensor] = {}

    def take(lr: object, optimizer: object) -> dict[str, float]:
        for name, param in engine.module.named_parameters():
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            found[name] = grad.clone()
        return {"skipped_update": 0.0}

    engine.optimizer.step = take
    try:
        stats = trainer.update(trainer.next_batch(0))
    finally:
        trainer.close()
    return stats["loss"], found


def theirs(trainer: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of a TRL trainer with its own data loader, collator and loss."""
    (inputs,) = list(trainer.get_train_dataloader())
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    named = trainer.model.named_parameters()
    return loss.item(), {name: param.grad for name, param in named if param.grad is not None}


def assert_same(mine: Any, other: Any) -> None:
    (loss, gradient), (expected_loss, expected) = mine, other
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert gradient.keys() == expected.keys() and expected
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert largest > 1e-4, "a gradient of zeros proves nothing"
    for name, tensor in expected.items():
        worst = float((gradient[name] - tensor).abs().max())
        assert worst <= TOLERANCE * largest, (name, worst, largest)


@pytest.fixture
def models(tmp_path: Path) -> Iterator[list[Path]]:
    yield [tiny_model(tmp_path / f"model{seed}", seed=seed, init_std=0.1) for seed in (0, 1)]


def made(tmp_path: Path, model: Path, kind: str, **dpo: Any) -> ExperimentConfig:
    config = settings(tmp_path, model, kind, batch_size=9)
    data = replace(config.dataset, train=jsonl(tmp_path, rows(kind)))
    trainer = replace(config.trainer, dpo=DPOConfig(**dpo))
    return replace(config, dataset=data, trainer=trainer)


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": 9,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "max_length": None,
    }


def causal(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def common(model: Path, kind: str) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer

    told = rows(kind)
    if kind == "reward":
        told = [{n: row["prompt"] + row[n] for n in ("chosen", "rejected")} for row in told]
    return {
        "train_dataset": Dataset.from_list(told),
        "processing_class": AutoTokenizer.from_pretrained(model),
    }


def test_sft_matches_trl(tmp_path: Path, models: list[Path]) -> None:
    import trl

    mine = ours(made(tmp_path, models[0], "sft"))
    args = trl.SFTConfig(**options(tmp_path), loss_type="nll")
    assert_same(
        mine, theirs(trl.SFTTrainer(causal(models[0]), args=args, **common(models[0], "sft")))
    )


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_dpo_matches_trl(tmp_path: Path, models: list[Path], loss: Any) -> None:
    import trl

    config = made(tmp_path, models[0], "dpo", beta=0.3, loss=loss, reference=str(models[1]))
    mine = ours(config)
    args = trl.DPOConfig(**options(tmp_path), beta=0.3, loss_type=loss)
    peer = trl.DPOTrainer(
        causal(models[0]),
        ref_model=causal(models[1]),
        args=args,
        **common(models[0], "dpo"),
    )
    assert_same(mine, theirs(peer))


def test_reward_model_matches_trl(tmp_path: Path, models: list[Path]) -> None:
    import trl
    from transformers import AutoModelForSequenceClassification

    config = made(tmp_path, models[0], "reward")  # train one epoch, so that the head is not zero
    trainers.get("reward")(config).train()  # type: ignore[call-arg]
    model = run_paths(config).export
    mine = ours(replace(config, trial_name="t2", model=replace(config.model, path=str(model))))
    peer = trl.RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32),
        args=trl.RewardConfig(**options(tmp_path)),
        **common(model, "reward"),
    )
    assert_same(mine, theirs(peer))
