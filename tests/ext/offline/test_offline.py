"""The offline loop: rows of a step, files of a run, and exact resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from arealite.api.engine import LossFn, Sequence
from arealite.api.engine_config import (
    FSDPConfig,
    LoRAConfig,
    OptimizerConfig,
    TrainEngineConfig,
)
from arealite.api.experiment_config import (
    DatasetConfig,
    ExperimentConfig,
    LoggerConfig,
    ModelConfig,
    run_paths,
)
from arealite.api.trainer import TrainerConfig, trainers
from arealite.api.trial import ClusterConfig
from arealite.ext.offline.config import DPOConfig, OfflineConfig, SFTConfig
from arealite.ext.offline.offline_trainer import OfflineTrainer
from arealite.impl.engine import checkpoint
from arealite.impl.logger.jsonl import JSONLLogger
from arealite.impl.trainer.base import Components
from arealite.impl.trainer.batch import Minibatch
from arealite.impl.trainer.rank_group import World
from arealite.system.links.trainer_link import TrainerLink
from tests.models import tiny_model
from tests.system.data.test_dataset import jsonl

KINDS = ("sft", "dpo", "reward")
HEADS = {"sft": "logprobs", "dpo": "logprobs", "reward": "values"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


def rows(count: int) -> list[dict[str, str]]:
    """Return rows with distinct first tokens, valid for every offline trainer."""
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    return [
        {
            "prompt": f"{letters[i]}=",
            "completion": letters[i] * (1 + i % 3),
            "chosen": letters[i] * (1 + i % 3),
            "rejected": "?" * (1 + i % 2),
        }
        for i in range(count)
    ]


def settings(
    folder: Path,
    model: Path,
    kind: str = "sft",
    *,
    count: int = 10,
    held_out: int = 0,
    **offline: Any,
) -> ExperimentConfig:
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    train = jsonl(data, rows(count))
    evaluated = data / "eval.jsonl"
    evaluated.write_text("".join(json.dumps(row) + "\n" for row in rows(held_out)))
    defaults = {"batch_size": 4, "epochs": 2, "lr": 1e-2, "checkpoint_every_steps": 0}
    optimizer = OptimizerConfig(warmup_steps=2, schedule="cosine", weight_decay=0.1)
    return ExperimentConfig(
        model=ModelConfig(path=str(model)),
        dataset=DatasetConfig(train=train, eval=str(evaluated) if held_out else None),
        cluster=ClusterConfig(run_root=str(folder / "runs")),
        trainer=TrainerConfig(
            type=kind, offline=OfflineConfig(**defaults | {"optimizer": optimizer} | offline)
        ),
        logger=LoggerConfig(types=[]),
    )


class FakeEngine:
    """An engine that records its calls; its checkpoints hold the `extra` argument."""

    def __init__(self, head: str = "logprobs") -> None:
        self.head = head
        self.batches: list[list[Sequence]] = []
        self.saved: list[int] = []
        self.exported = 0
        self.after: Callable[[int], None] = lambda step: None

    def forward(self, rows: list[Sequence]) -> dict[str, list[np.ndarray]]:
        names = ("logprobs", "entropy") if self.head == "logprobs" else ("values",)
        return {n: [np.full(len(row.tokens), -0.5, np.float32) for row in rows] for n in names}

    def train_batch(
        self, rows: list[Sequence], loss_fn: LossFn, *, rows_per_example: int = 1
    ) -> dict[str, float]:
        self.batches.append(rows)
        self.after(len(self.batches))
        return {"loss": 1.0, "lr": 0.1}

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        (path / "extra.json").write_text(json.dumps({"extra": extra}))
        self.saved.append(extra["step"])

    def load(self, path: Path) -> dict[str, Any]:
        return json.loads((path / "extra.json").read_text())["extra"]

    def export(self, path: Path) -> None:
        self.exported += 1


def faked(config: ExperimentConfig, *, rank: int = 0, size: int = 1) -> OfflineTrainer:
    kind = config.trainer.type
    parts = Components(
        world=World(rank=rank, size=size),
        engine=FakeEngine(HEADS[kind]),  # type: ignore[arg-type]
        connect=TrainerLink,  # type: ignore[arg-type]
        loggers=[JSONLLogger(run_paths(config).root)],
    )
    dpo = replace(config.trainer.dpo, reference_free=True)
    config = replace(config, trainer=replace(config.trainer, dpo=dpo))
    return trainers.get(kind)(config, parts)  # type: ignore[call-arg]


def first_batch(config: ExperimentConfig, **place: int) -> Minibatch:
    trainer = faked(config, **place)
    batch = trainer.next_batch(0)
    trainer.close()
    return batch


def engine_of(trainer: OfflineTrainer) -> FakeEngine:
    return trainer.engine  # type: ignore[return-value]


def metrics(config: ExperimentConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in run_paths(config).metrics.read_text().splitlines()]


def seen(trainer: OfflineTrainer) -> list[list[int]]:
    """Return the first token of each row of each batch."""
    return [[int(row.tokens[0]) for row in batch] for batch in engine_of(trainer).batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def test_each_epoch_has_every_row_once_in_a_new_order(tmp_path, model):
    trainer = faked(settings(tmp_path, model))
    trainer.train()
    batches = seen(trainer)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2], "10 rows, 4 a batch, 2 epochs"
    first, second = flat(batches[:3]), flat(batches[3:])
    assert len(set(first)) == 10 and sorted(first) == sorted(second)
    assert first != sorted(first) and first != second
    again = faked(settings(tmp_path / "again", model))
    again.train()
    assert seen(again) == batches, "the seed decides"
    config = settings(tmp_path / "other", model)
    other = faked(replace(config, seed=7))
    other.train()
    assert seen(other) != batches
    plain = faked(replace(config, trial_name="p", dataset=replace(config.dataset, shuffle=False)))
    plain.train()
    assert flat(seen(plain)[:3]) == sorted(first)


def test_max_steps_limits_the_number_of_steps(tmp_path, model):
    trainer = faked(settings(tmp_path, model, max_steps=4))
    trainer.train()
    assert len(seen(trainer)) == trainer.total_steps == 4
    assert engine_of(trainer).exported == 1


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_get_disjoint_shards_of_a_batch(tmp_path, model, kind):
    config = settings(tmp_path, model, kind)
    whole = first_batch(config)
    parts = [first_batch(config, rank=rank, size=3) for rank in range(3)]
    tokens = sum(len(row.tokens) for part in parts for row in part.rows)
    for part in parts:
        assert (part.num_rows, part.num_tokens) == (len(whole.rows), tokens)
        assert len(part.rows) % (1 if kind == "sft" else 2) == 0
    got = sorted(row.tokens.tolist() for part in parts for row in part.rows)
    assert got == sorted(row.tokens.tolist() for row in whole.rows)
    shared = [row for part in parts for row in part.rows]
    if kind == "sft":  # a token mean: the weights of the whole batch sum to 1
        total = sum(float(row.fields["loss_weight"].sum()) for row in shared)
        assert total == pytest.approx(1.0, rel=1e-6)
    else:
        weights = {float(row.fields["loss_weight"][0]) for row in shared}
        assert weights == {0.25}, "four pairs"


def test_sft_weights_tokens_by_the_role_of_their_message(tmp_path, model):
    config = settings(tmp_path, model)
    tokens, mask = [3, 4, 5, 6, 7, 8], [0, 1, 1, 0, 0, 1]
    data = replace(config.dataset, train=jsonl(tmp_path, [{"tokens": tokens, "loss_mask": mask}]))
    config = replace(config, dataset=data)

    def weights(row: dict[str, Any] | None = None, **sft: float) -> list[float]:
        if row is not None:
            Path(data.train).write_text(json.dumps(row))
        trainer = replace(config.trainer, sft=SFTConfig(**sft))
        batch = first_batch(replace(config, trainer=trainer))
        if not batch.rows:
            return []
        (row,) = batch.rows
        assert not row.fields["loss_weight"][~row.loss_mask].any()
        return row.fields["loss_weight"].tolist()

    assert weights() == pytest.approx([0, 1 / 3, 1 / 3, 0, 0, 1 / 3])
    assert weights(assistant_weight=0.0, next_state_weight=2.0) == [0, 0, 0, 0.5, 0.5, 0]
    assert weights(next_state_weight=0.5) == pytest.approx([0, 0.25, 0.25, 0.125, 0.125, 0.25])
    row = {"tokens": [3, 4], "loss_mask": [0, 1], "next_state": "abc"}
    assert weights(row, assistant_weight=0.0, next_state_weight=1.0) == pytest.approx(
        [0, 0, 1 / 3, 1 / 3, 1 / 3]
    )
    assert weights(row, next_state_weight=1.0) == pytest.approx([0, 0.25, 0.25, 0.25, 0.25])
    assert weights(row) == [0, 1], "the policy's own tokens only"


def test_reward_row_has_one_more_token_for_the_score(tmp_path, model):
    batch = first_batch(settings(tmp_path, model, "reward"))
    policy = first_batch(settings(tmp_path, model, "dpo"))
    for scored, row in zip(batch.rows, policy.rows, strict=True):
        assert scored.tokens[:-1].tolist() == row.tokens.tolist()
        assert scored.loss_mask.nonzero()[0].tolist() == [len(row.tokens)]


def test_rows_without_answer_tokens_are_skipped(tmp_path, model):
    trainer = faked(settings(tmp_path, model, max_tokens=2))
    trainer.train()
    assert engine_of(trainer).batches == [], "nothing but prompts fits"
    assert metrics(trainer.config)[0]["update/skipped_update"] == 1.0
    batch = first_batch(settings(tmp_path / "dpo", model, "dpo", max_tokens=3))
    assert [len(row.tokens) for row in batch.rows] == [3] * 8, "two rows an example"
    assert (batch.num_rows, batch.num_tokens) == (8, 24)


def test_held_out_rows_without_an_answer_have_no_loss(tmp_path, model):
    config = settings(tmp_path, model, held_out=3, max_tokens=2)
    faked(config).train()
    lines = [line for line in metrics(config) if "eval/examples" in line]
    assert [line["step"] for line in lines] == [0, 6]
    assert [{*line} for line in lines] == [{"step", "time", "eval/examples"}] * 2
    assert [line["eval/examples"] for line in lines] == [0.0, 0.0]


def test_evaluations_and_checkpoints_follow_their_intervals(tmp_path, model):
    config = settings(
        tmp_path, model, held_out=3, eval_every_steps=4, checkpoint_every_steps=2, checkpoint_keep=2
    )
    trainer = faked(config)
    trainer.train()
    lines = metrics(config)
    evals = [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line]
    assert evals == [(0, 0.5), (4, 0.5), (6, 0.5)]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 7))
    assert engine_of(trainer).saved == [2, 4, 6]
    good = checkpoint.list_good(run_paths(config).checkpoints)
    assert [path.name for path in good] == ["step-000004", "step-000006"]


def test_stopped_run_saves_a_checkpoint_and_resumes_from_it(tmp_path, model):
    whole = faked(settings(tmp_path / "whole", model))
    whole.train()
    config = settings(tmp_path, model)
    first = faked(config)
    engine_of(first).after = lambda count: setattr(first.stop, "requested", count == 2)
    first.train()
    assert engine_of(first).saved == [2] and engine_of(first).exported == 0
    second = faked(config)
    second.train()
    assert seen(first) + seen(second) == seen(whole)
    assert [line["step"] for line in metrics(config)] == list(range(1, 7))
    third = faked(config)
    third.train()
    assert seen(third) == [] and engine_of(third).exported == 1, "a finished run is left as it is"


def killed(kind: str, config: ExperimentConfig, *, at: int) -> None:
    """Train `at` steps and stop without a final checkpoint, as if killed."""
    trainer: Any = trainers.get(kind)(config)  # type: ignore[call-arg]
    update = trainer.update

    def until_killed(batch: Any) -> dict[str, float]:
        if trainer.clock_steps == at:
            raise KeyboardInterrupt
        trainer.clock_steps += 1
        return update(batch)

    trainer.clock_steps, trainer.update = 0, until_killed
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_resumed_run_is_bitwise_equal(tmp_path, model, kind):
    options = {"checkpoint_every_steps": 2, "eval_every_steps": 2, "held_out": 3, "epochs": 3}
    configs = [settings(tmp_path / name, model, kind, **options) for name in ("whole", "killed")]
    trainers.get(kind)(configs[0]).train()  # type: ignore[call-arg]
    killed(kind, configs[1], at=5)
    trainers.get(kind)(configs[1]).train()  # type: ignore[call-arg]
    weights = [load_file(run_paths(c).export / "model.safetensors") for c in configs]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    begun = load_file(model / "model.safetensors")
    assert any(not torch.equal(weights[0][name], begun[name]) for name in begun)

    def bare(line: dict[str, float]) -> dict[str, float]:
        groups = ("step", "train/", "eval/", "update/")
        return {name: value for name, value in line.items() if name.startswith(groups)}

    told = [[bare(line) for line in metrics(config)] for config in configs]
    assert told[0] == told[1]
    losses = [line["eval/loss"] for line in told[0] if "eval/loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_dpo_margin_starts_at_0_and_grows(tmp_path, model, loss):
    config = settings(tmp_path, model, "dpo", held_out=10, epochs=4)
    dpo = DPOConfig(loss=loss, beta=0.5)
    config = replace(config, trainer=replace(config.trainer, dpo=dpo))
    trainers.get("dpo")(config).train()  # type: ignore[call-arg]
    first, *_, last = [line for line in metrics(config) if "eval/margin" in line]
    assert first["eval/margin"] == pytest.approx(0.0, abs=1e-6), "the reference is the start"
    assert first["eval/loss"] == pytest.approx({"sigmoid": np.log(2.0)}.get(loss, 1.0), abs=1e-5)
    assert last["eval/margin"] > first["eval/margin"] and last["eval/loss"] < first["eval/loss"]


def test_dpo_with_lora_uses_the_base_model_as_reference(tmp_path, model):
    pytest.importorskip("peft")
    engine = TrainEngineConfig(fsdp=FSDPConfig(lora=LoRAConfig(rank=4)))
    config = settings(tmp_path, model, "dpo", held_out=10, epochs=4, engine=engine)
    trainers.get("dpo")(config).train()  # type: ignore[call-arg]
    first, *_, last = [line for line in metrics(config) if "eval/margin" in line]
    assert first["eval/margin"] == pytest.approx(0.0, abs=1e-6)
    assert last["eval/margin"] > 0.01 and last["eval/loss"] < first["eval/loss"]
