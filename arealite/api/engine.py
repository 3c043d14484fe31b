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
        rows_per_example: int = 1,
        record_outputs: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """Apply one optimizer update over all rows of all ranks.

        An update whose gradient norm is not finite is skipped.

        Args:
            all_lengths: as in `forward`.
            rows_per_example: so many consecutive rows stay in one micro-batch, in their order;
                2 for pairs of a preferred and a rejected answer.
            record_outputs: {output: field}: outputs of this pass that become fields of the rows,
                without gradient, before the loss function is called. They replace a `forward`.

        Returns:
            The loss function's stats, summed, with `grad_norm`, `lr` and `skipped_update` (0 or 1).
        """

    @abstractmethod
    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write model, optimizer, schedule and `extra` into `folder`; every rank its shards."""

    @abstractmethod
    def load(self, folder: Path) -> dict[str, Any]:
        """Read what `save` wrote, at any number of ranks; return `extra`.

        Raises:
            UserError: the folder is of another model or another optimizer.
        """

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
