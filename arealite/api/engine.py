"""A train engine knows one model and its shards; trainers speak to it in ragged sequences.

Shape letters: B = rows of a micro-batch, T = tokens of a row, V = vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from arealite.api.fields import opt, sub
from arealite.base.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule; the learning rate itself stands beside the algorithm."""

    beta1: float = opt(0.9, "AdamW")
    beta2: float = opt(0.95, "AdamW")
    eps: float = opt(1e-8, "AdamW")
    weight_decay: float = opt(0.0, "AdamW, on matrices only")
    clip_grad_norm: float = opt(1.0, "global norm; 0 leaves gradients as they are")
    schedule: Literal["constant", "linear", "cosine"] = opt("constant", "after the warm-up")
    warmup_steps: int = opt(10, "optimizer updates of linear warm-up")
    min_lr_ratio: float = opt(0.0, "end of the decay, as a share of lr")


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Fully sharded data parallelism (FSDP2) over all ranks."""

    max_tokens_per_microbatch: int = opt(
        8192, "padded tokens of a micro-batch; one longer row is allowed"
    )
    dtype: Literal["float32", "bfloat16"] = opt("float32", "of compute; masters are float32")
    gradient_checkpointing: bool = opt(False, "recompute activations in the backward pass")
    logprob_chunk_tokens: int = opt(4096, "tokens whose logits exist at one time")


@dataclass(frozen=True, kw_only=True)
class TrainEngineConfig:
    """Which engine holds the model."""

    type: str = opt("fsdp", "name in the table of engines")
    fsdp: FSDPConfig = sub(FSDPConfig, "options of type=fsdp")


@dataclass
class Sequence:
    """One training row. `fields` travel to the loss function beside the logprobs."""

    tokens: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """bool [T]: the tokens whose logprob enters the loss; never the first."""
    temperature: float
    fields: dict[str, np.ndarray] = field(default_factory=lambda: dict[str, "np.ndarray"]())
    """float32 [T] each: behav_logprobs, prox_logprobs, advantages, loss_weight, …"""


@dataclass(frozen=True)
class LossInput:
    """What a loss function sees of one micro-batch; flat over its loss tokens N (loss_mask true,
    row after row)."""

    logprobs_N: torch.Tensor
    """Under the current parameters, with gradient."""
    entropy_N: torch.Tensor
    """Of the whole next-token distribution, with gradient."""
    rows_N: torch.Tensor
    """int64: which row of the micro-batch each token is of; for sequence-level ratios."""
    fields: dict[str, torch.Tensor]
    """float32 [N] each, as in Sequence.fields."""


LossFn = Callable[[LossInput], "tuple[torch.Tensor, dict[str, torch.Tensor]]"]
"""Returns (loss, stats). The loss is a SUM over tokens already weighted by `loss_weight`, so that
micro-batches and
ranks add up to the global loss. Stats are weighted sums too (same weights): they are added over
micro-batches and ranks."""


class TrainEngine(ABC):
    """One model, its optimizer and its shards. Every method is collective: all ranks call it, in
    one order."""

    @abstractmethod
    def forward(
        self, rows: list[Sequence], all_lengths: list[list[int]]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return (logprobs, entropies), float32 [T] a row, 0 outside loss_mask; no gradient.

        `all_lengths[r]` are the row lengths of rank r, so that all ranks run the same number of
        micro-batches.
        """

    @abstractmethod
    def train_batch(
        self, rows: list[Sequence], all_lengths: list[list[int]], loss_fn: LossFn
    ) -> dict[str, float]:
        """Apply one optimizer update over all rows of all ranks; return summed stats, `grad_norm`,
        `lr`.

        A non-finite gradient norm skips the update and returns `skipped_update` 1.
        """

    @abstractmethod
    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Write a sharded checkpoint (model, optimizer, schedule, RNG, `extra`) into the folder
        `path`."""

    @abstractmethod
    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint back, at any number of ranks; return `extra`."""

    @abstractmethod
    def export(self, path: Path) -> None:
        """Write a Hugging Face folder that `from_pretrained` loads; rank 0 writes."""

    @abstractmethod
    def stream_weights(self, *, on_device: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) one at a time on rank 0; other ranks take part and
        yield nothing.

        A tensor is a CPU copy; with `on_device` it is where the model is, perhaps the parameter
        itself: good until the next update.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return 16 hex digits on every rank that change with any bit of any parameter.

        Comparable between equal world sizes only; never a defence against malice.
        """


engines: Registry[TrainEngine] = Registry(
    "train_engine", {"fsdp": "arealite.impl.engine.fsdp:FSDPEngine"}
)
