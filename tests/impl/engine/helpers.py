"""Rows, engines and comparisons shared by the engine's tests and their worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from arealite.algo.losses import make_policy_loss
from arealite.api.algorithm import LossConfig
from arealite.api.engine import Head, LossFn, LossInput, Sequence, Training
from arealite.api.engine_config import FSDPConfig, LoRAConfig, OptimizerConfig
from arealite.base.model_folder import experts_of, read_json
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.trainer.base import read_engines, write_engines
from arealite.impl.trainer.rank_group import World

LOSS = make_policy_loss(LossConfig(eps_low=0.9, eps_high=9.0))
CENTERED = make_policy_loss(LossConfig(eps_low=0.9, eps_high=9.0, centering=True))
FIELDS = ("behav_logprobs", "prox_logprobs", "advantages")
VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {"shard_size": 1},
    "sgd": {"optimizer": {"type": "sgd"}},
    "offload": {"cpu_offload": True},
    "value": {"head": "value"},
    "lora": {"lora": LoRAConfig(rank=4)},
    "float16, low": {"dtype": "float16", "optimizer": {"type": "sgd"}},
    "lora, low": {
        "lora": LoRAConfig(rank=4),
        "dtype": "bfloat16",
        "optimizer": {"type": "sgd"},
    },
}
"""Options of make_engine under which ranks must agree, too."""
CONTEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("window", {}),
    "packed": ("window", {"layout": "packed"}),
    "recomputed": ("window", {"gradient_checkpointing": True, "shard_size": 1}),
    "lora": ("window", {"lora": LoRAConfig(rank=4), "layout": "packed"}),
    "value": ("window", {"head": "value"}),
    "packed, top": ("window", {"layout": "packed"}),
    "sinks": ("gpt_oss", {}),
    "latent, routed": ("deepseek_v3", {}),
    "low": ("window", {"dtype": "bfloat16", "layout": "packed", "optimizer": {"type": "sgd"}}),
}
"""Model and options of make_engine under which ranks that share rows must equal one rank."""


def to_advantages(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute half the squared distance of values to the field `advantages`."""
    error = batch.outputs["values"] - batch.fields["advantages"]
    loss = (0.5 * error.square() * batch.fields["loss_weight"]).sum()
    return loss, {"loss": loss.detach()}


def loss_of(engine: FSDPEngine, rows: list[Sequence] | None = None) -> LossFn:
    """Return a loss for the engine's head, and for the top ids of the rows."""
    if engine.head == "value":
        return to_advantages
    has_top_ids = any(row.top_ids is not None for row in rows or [])
    return CENTERED if has_top_ids else LOSS


def make_rows(count: int = 12, seed: int = 0, temperature: float | None = None) -> list[Sequence]:
    """Draw rows of 3 to 40 tokens, loss on scattered tokens, weights for a token mean.

    Every second row begins with a prefix of the row before it; both rows have loss in the prefix.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(rng.integers(3, 40))
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        fields = {name: rng.normal(-2, 0.3, length).astype(np.float32) for name in FIELDS}
        fields["advantages"] += 2.0
        tokens = rng.integers(3, 64, length).astype(np.int32)
        if len(rows) % 2:
            common = rows[-1].tokens[: 2 * length // 3]
            tokens[: len(common)] = common
        rows.append(
            Sequence(
                tokens=tokens,
                loss_mask=mask,
                temperature=temperature or float(rng.uniform(0.5, 1.5)),
                fields=fields,
            )
        )
    total = sum(int(row.loss_mask.sum()) for row in rows)
    for row in rows:
        row.fields["loss_weight"] = np.full(len(row.tokens), 1.0 / total, np.float32)
    return rows


def random_record(rows: list[Sequence], path: Path, seed: int = 1) -> list[Sequence]:
    """Give each token random experts; every third token has no record."""
    experts, draw = experts_of(read_json(path)), np.random.default_rng(seed)
    assert experts is not None
    for row in rows:
        count = len(row.tokens) * experts.layers
        drawn = [draw.permutation(experts.number)[: experts.per_token] for _ in range(count)]
        row.routing = np.stack(drawn).astype(np.uint8).reshape(len(row.tokens), -1)
        row.routing[::3] = 255
    rows[0].routing = None
    return rows


def make_engine(
    model: Path | str,
    *,
    head: Head = "lm",
    seed: int = 0,
    optimizer: dict[str, Any] | None = None,
    adapter: str | None = None,
    **config: Any,
) -> FSDPEngine:
    """Build an engine with a high learning rate and no warm-up."""
    return FSDPEngine(
        FSDPConfig(**config),
        model_path=str(model),
        seed=seed,
        training=Training(
            optimizer=OptimizerConfig(
                **{"warmup_steps": 0, "weight_decay": 0.1} | (optimizer or {})
            ),
            lr=1e-2,
            total_updates=10,
        ),
        head=head,
        adapter=adapter,
    )


def add_routing(rows: list[Sequence], *, layers: int = 2, experts: int = 4) -> None:
    """Draw two experts for each token and layer, as a server would record them."""
    rng = np.random.default_rng(1)
    for row in rows:
        draws = rng.random((len(row.tokens), layers, experts)).argsort(-1)[..., :2]
        row.routing = draws.astype(np.uint8).reshape(len(row.tokens), -1)


def add_top_ids(rows: list[Sequence], *, size: int, truncated: float = 0.0) -> None:
    """Give each token the `size` most probable ids of a random sampler of 64 ids.

    Args:
        rows: The rows.
        size: K.
        truncated: Share of tokens whose sampler kept at most five ids, the sampled one among them.
    """
    rng = np.random.default_rng(3)
    for row in rows:
        count = len(row.tokens)
        logits = rng.normal(0, 1.5, (count, 64))
        row.is_truncated = rng.random(count) < truncated
        is_cut = row.is_truncated[:, None]
        logits[is_cut & (logits.argsort().argsort() < 60)] = -np.inf
        logits[np.arange(count), row.tokens] = 2.0
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        top = (-logprobs).argsort(-1)[:, :size].astype(np.int32)
        top_logprobs = np.take_along_axis(logprobs, top, -1).astype(np.float32)
        top[np.isneginf(top_logprobs)] = -1
        row.top_ids = top
        row.fields["behav_top_logprobs"] = top_logprobs


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copy all weights."""
    return {name: tensor.clone() for name, tensor in engine.stream_weights()}


def save(engine: FSDPEngine, path: Path, extra: dict[str, Any]) -> None:
    """Write a checkpoint as a trainer does."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    write_engines(path, {".": engine}, extra, world)


def load(engine: FSDPEngine, path: Path) -> dict[str, Any]:
    """Read a checkpoint as a trainer does."""
    return read_engines(path, {".": engine})


def gradients(
    engine: FSDPEngine,
    rows: list[Sequence],
    loss: LossFn | None = None,
    *,
    updates: bool = False,
    record_outputs: dict[str, str] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Run train_batch, up to the optimizer or with its step; return full gradients and the stats.

    Args:
        engine: The engine.
        rows: Of this rank.
        loss: None: see loss_of.
        updates: Whether the optimizer updates the weights.
        record_outputs: See train_batch.
    """
    found: dict[str, torch.Tensor] = {}
    step = engine.optimizer.step

    def take(*options: Any) -> dict[str, float]:
        for name, param in engine.module.named_parameters():
            if not param.requires_grad:
                assert param.grad is None
                continue
            assert param.grad is not None
            grad = param.grad
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        if updates:
            return step(*options)
        for param in engine.module.parameters():
            param.grad = None
        return {"skipped_update": 0.0}

    engine.optimizer.step = take  # type: ignore[method-assign]
    try:
        stats = engine.train_batch(
            rows, loss or loss_of(engine, rows), record_outputs=record_outputs
        )
    finally:
        engine.optimizer.step = step  # type: ignore[method-assign]
    return found, stats


def assert_close(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tolerance: float = 1e-5
) -> None:
    """Compare tensors by name, to `tolerance` of the largest entry of each.

    A gradient that is 0 up to rounding has no such entry, for example that of the keys' bias. It is
    compared to a small absolute tolerance.
    """
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        worst = float((got[name] - tensor).abs().max())
        assert worst <= tolerance * float(tensor.abs().max()) + max(1e-9, 1e-5 * tolerance), (
            name,
            worst,
        )
