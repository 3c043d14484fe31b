"""A train engine knows one model and its shards; trainers speak to it in ragged sequences.

Shape letters: B = rows of a micro-batch, T = tokens of a row, V = vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from arealite.api.engine_config import OptimizerConfig
from arealite.base.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import torch


Head = Literal["lm", "value"]
"""What a model computes of each token: its logprob and entropy, or one number (critics, reward
models)."""


@dataclass(frozen=True)
class Training:
    """What an engine needs to train; one without it is frozen: a reference policy."""

    optimizer: OptimizerConfig
    lr: float
    total_updates: int
    """At which a schedule ends."""


@dataclass
class Sequence:
    """One training row. `fields` travel to the loss function beside the logprobs."""

    tokens: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """bool [T]: the tokens that enter the loss, never the first. What an engine computes of token t
    comes from the tokens before it: its logprob, or the value of the state it was sampled in."""
    temperature: float
    fields: dict[str, np.ndarray] = field(default_factory=lambda: dict[str, "np.ndarray"]())
    """float32 [T] each: behav_logprobs, prox_logprobs, advantages, loss_weight, …"""


@dataclass(frozen=True)
class LossInput:
    """What a loss function sees of one micro-batch; flat over its loss tokens N (loss_mask true,
    row after row)."""

    outputs: dict[str, torch.Tensor]
    """float32 [N] each, under the current parameters, with gradient. Head lm: `logprobs` at the
    row's temperature, `entropy` of the whole next-token distribution. Head value: `values`."""
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
    ) -> dict[str, list[np.ndarray]]:
        """Return the head's outputs (see LossInput), float32 [T] a row, 0 outside loss_mask; no
        gradient.

        `all_lengths[r]` are the row lengths of rank r, so that all ranks run the same number of
        micro-batches.
        """

    @abstractmethod
    def train_batch(
        self,
        rows: list[Sequence],
        all_lengths: list[list[int]],
        loss_fn: LossFn,
        *,
        together: int = 1,
        noting: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """Apply one optimizer update over all rows of all ranks; return summed stats, `grad_norm`,
        `lr`.

        Each `together` consecutive rows stand in one micro-batch, in their order: pairs of which
        one is preferred. `noting` makes outputs of this pass fields of the rows, {output: field},
        without gradient, before the loss function sees them: those of `forward`, for no pass.
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
