"""SFT, DPO and the reward model learn the demo's task: sorting held-out digits."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from arealite.api.engine_config import OptimizerConfig
from arealite.api.experiment_config import (
    DatasetConfig,
    ExperimentConfig,
    LoggerConfig,
    ModelConfig,
    run_paths,
)
from arealite.api.trainer import TrainerConfig, trainers
from arealite.api.trial import ClusterConfig
from arealite.ext.demo.sorting import SHAPE, answer, draw, held_out, question
from arealite.ext.demo.tiny_model import make_tiny_model
from arealite.ext.offline.config import OfflineConfig
from tests.system.data.test_dataset import jsonl

pytestmark = [pytest.mark.learning, pytest.mark.timeout(300)]

SEED = 1


def rows(digits: list[str], *, pairs: bool) -> list[dict[str, str]]:
    """Return rows with right answers; pairs have another order of the same digits as rejected."""
    rng, made = random.Random(SEED), []
    for each in digits:
        wrong = list(each)
        while "".join(wrong) == answer(each):
            rng.shuffle(wrong)
        if len(set(each)) == 1:
            continue
        right = {"chosen": answer(each), "rejected": "".join(wrong)}
        right = right if pairs else {"completion": answer(each)}
        made.append({"prompt": question(each), **right})
    return made


def run(folder: Path, model: Path, kind: str, *, steps: int, lr: float) -> ExperimentConfig:
    """Train `steps` steps of 128 rows; return the run."""
    evaluated = held_out(SEED)
    digits = draw(random.Random("supervised"), 4096, without=evaluated)
    files = []
    for name, drawn in (("train", digits), ("eval", evaluated[:128])):
        (folder / kind / name).mkdir(parents=True)
        files.append(jsonl(folder / kind / name, rows(drawn, pairs=kind != "sft")))
    config = ExperimentConfig(
        trial_name=kind,
        model=ModelConfig(path=str(model)),
        dataset=DatasetConfig(train=files[0], eval=files[1]),
        cluster=ClusterConfig(run_root=str(folder / "runs")),
        trainer=TrainerConfig(
            type=kind,
            offline=OfflineConfig(
                lr=lr,
                epochs=100,
                max_steps=steps,
                batch_size=128,
                checkpoint_every_steps=0,
                optimizer=OptimizerConfig(schedule="linear"),
            ),
        ),
        logger=LoggerConfig(types=[]),
    )
    trainers.get(kind)(config).train()  # type: ignore[call-arg]
    return config


def evals(config: ExperimentConfig) -> tuple[dict[str, float], dict[str, float]]:
    """Return the held-out metrics before and after training."""
    lines = [json.loads(line) for line in run_paths(config).metrics.read_text().splitlines()]
    first, *_, last = [line for line in lines if "eval/loss" in line]
    return first, last


def accuracy(path: Path) -> float:
    """Return the share of held-out rows that greedy decoding answers right."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    digits = held_out(SEED)[:128]
    texts = [[*tokenizer.encode(question(d) + answer(d)), tokenizer.eos_token_id] for d in digits]
    ids = torch.tensor(texts)
    with torch.no_grad():
        best = model(input_ids=ids).logits[:, :-1].argmax(-1)
    asked = len(tokenizer.encode(question(digits[0])))
    return float((best == ids[:, 1:])[:, asked - 1 :].all(-1).float().mean())


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model."""
    shape = dataclasses.replace(SHAPE, seed=SEED)
    return make_tiny_model(tmp_path_factory.mktemp("random_model") / "model", shape)


@pytest.fixture(scope="module")
def taught(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ExperimentConfig:
    """Return an SFT run on right answers."""
    return run(tmp_path_factory.mktemp("sft"), random_model, "sft", steps=400, lr=4e-3)


def test_sft_lowers_the_loss_and_raises_the_accuracy(
    random_model: Path, taught: ExperimentConfig
) -> None:
    before, after = evals(taught)
    assert before["eval/loss"] > 2.0 and after["eval/loss"] < 0.3
    assert accuracy(random_model) == 0.0
    assert accuracy(run_paths(taught).export) > 0.5


def test_dpo_raises_the_margin(taught: ExperimentConfig, tmp_path: Path) -> None:
    before, after = evals(run(tmp_path, run_paths(taught).export, "dpo", steps=30, lr=2e-4))
    assert before["eval/margin"] == pytest.approx(0.0, abs=1e-5)
    assert after["eval/margin"] > 0.5 and after["eval/loss"] < 0.5
    assert after["eval/accuracy"] > 0.9
    # The rejected answers lose probability, not the chosen answers.
    assert after["eval/rejected"] < after["eval/chosen"] - 0.5


def test_reward_model_prefers_right_answers(random_model: Path, tmp_path: Path) -> None:
    before, after = evals(run(tmp_path, random_model, "reward", steps=60, lr=4e-3))
    assert before["eval/loss"] == pytest.approx(0.6931, abs=1e-3), "it cannot tell them apart"
    assert after["eval/accuracy"] > 0.95 and after["eval/loss"] < 0.2
