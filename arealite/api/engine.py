"""The train-engine interface: an engine has one model, its shards and its optimizer.

Trainers pass rows of different lengths. Shapes: T = tokens of a row, N = loss tokens, K = top ids
of a token.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arealite.api.engine_config import Head, LoRAConfig, OptimizerConfig, Training
from arealite.base.errors import UserError
from arealite.base.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel


@dataclass(kw_only=True)
class Sequence:
    """One training row."""

    tokens: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """bool [T]: the tokens in the loss, never the first. The output for a token depends on earlier
    tokens only: the token's logprob, or the value of the state in which it was sampled."""
    temperature: float
    fields: dict[str, np.ndarray] = field(default_factory=lambda: dict[str, "np.ndarray"]())
    """Inputs of the loss function, float32 [T] each: behav_logprobs, advantages, loss_weight, …;
    float32 [T, K]: behav_top_logprobs, the sampler's logprobs of `top_ids`."""
    routing: np.ndarray | None = None
    """uint8 [T, bytes]: the experts that a server chose, as in `Segment.routing`."""
    top_ids: np.ndarray | None = None
    """int32 [T, K]: ids whose logprobs are an output, -1: none. All rows of a call have one K."""
    is_truncated: np.ndarray | None = None
    """bool [T]: some tokens could not be sampled, and the ids ≥ 0 of `top_ids` are all that
    could (SamplingConfig.num_truncated). `logprobs` and `top_logprobs` of the token are
    renormalised over them."""
    adapter: str = ""
    """The adapter of `TrainEngine.add_adapter` that computes the row; "": that of the config."""


@dataclass(frozen=True, kw_only=True)
class LossInput:
    """Input of a loss function: the N loss tokens (loss_mask true) of a micro-batch, by row."""

    outputs: dict[str, torch.Tensor]
    """float32 [N] each, under the current parameters, with gradient. Head lm: `logprobs` at the
    row's temperature, `entropy` of the next-token distribution before truncation, and
    `top_logprobs` [N, K] if rows have top ids. Head value: `values`."""
    rows_N: torch.Tensor
    """int64: the index of each token's row in the micro-batch, for sequence-level ratios."""
    fields: dict[str, torch.Tensor]
    """float32 [N] or [N, K] each, as in Sequence.fields."""


LossFn = Callable[[LossInput], "tuple[torch.Tensor, dict[str, torch.Tensor]]"]
"""Returns (loss, stats). The loss is a sum over tokens weighted by `loss_weight`; the losses of all
micro-batches and ranks sum to the global loss. Stats are sums with the same weights."""
Stats = dict[str, float]
"""Stats of one update, by name."""
Named = tuple[str, "torch.Tensor"]
"""A tensor and its name."""


class TrainedWeights(ABC):
    """Weights that one optimizer trains: those of an engine, or of an adapter added to it."""

    adapter_config: Mapping[str, object] | None = None
    """Content of adapter_config.json, as peft writes it, if adapters alone are trained."""

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward passes; above 1 in float16."""
        return 1.0

    @abstractmethod
    def optim_step(
        self,
        *,
        lr: float | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> Stats:
        """Apply the gradient of all `forward_backward` calls since the last update, and clear it.

        An update whose gradient norm is not finite is skipped.

        Args:
            lr: the learning rate of this update; None: that of the schedule.
            optimizer: options from now on, of the same type; None: the current ones.

        Returns:
            `grad_norm`, `lr` and `skipped_update` (0 or 1).

        Raises:
            UserError: there is no gradient.
        """

    @abstractmethod
    def drop_gradient(self) -> None:
        """Drop the gradient since the last `optim_step`."""

    @abstractmethod
    def save(self, folder: Path, extra: dict[str, object]) -> None:
        """Write weights, optimizer, schedule and `extra`; each rank writes its shards."""

    @abstractmethod
    def load(self, folder: Path) -> dict[str, Any]:
        """Load a folder that `save` wrote, with any number of ranks; return `extra`.

        The gradient since the last `optim_step` is dropped.

        Raises:
            UserError: the folder is of another model or another optimizer.
        """

    @abstractmethod
    def export(self, path: Path) -> None:
        """Write a Hugging Face folder that `from_pretrained` loads; rank 0 writes.

        The folder of an adapter is one that peft loads.
        """

    def stream_adapter(self) -> Iterator[Named]:
        """Yield (name in peft's file, full tensor) on rank 0, and nothing on other ranks.

        Only an engine with an `adapter_config` has an adapter. Each tensor is on the
        CPU, in float32, and may be the parameter itself.
        """
        yield from ()


@dataclass(frozen=True, kw_only=True)
class NewAdapter:
    """An adapter to add to an engine."""

    name: str
    """Letters, digits, "_" and "-", at most 100."""
    config: LoRAConfig
    training: Training
    seed: int
    """The seed of its first values."""
    folder: Path | None = None
    """An adapter that peft wrote, with which it starts in place of `config` and `seed`."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]{1,100}", self.name, re.ASCII):
            raise UserError(
                f"adapter {self.name!r}: use letters, digits, '_' and '-' for its name, up to 100."
            )


class TrainEngine(TrainedWeights):
    """A model, its shards and its optimizer. All ranks call the same methods in the same order.

    The methods of `TrainedWeights` train the weights of the config: all parameters, or an adapter.
    """

    whole_module: PreTrainedModel | None = None
    """The model whose parameters are trained in place; None if its parameters are sharded, or are
    not in the dtype of the forward pass."""
    unused_tensors: frozenset[str] = frozenset()
    """Tensors of the folder that the model ignores. They are not streamed."""
    replays_routing: bool = True
    """Whether experts in `Sequence.routing` replace the routers' choice; False: compare only."""

    @abstractmethod
    def __init__(
        self, config: object, *, model_path: str, seed: int, training: Training | None, head: Head
    ) -> None:
        """Load a folder with the options `config`, and `adapter=FOLDER` if model.adapter is set."""

    @abstractmethod
    def without_adapter(self) -> TrainEngine:
        """Return a frozen engine that keeps the current outputs; call this before any update."""

    @abstractmethod
    def forward(self, rows: list[Sequence]) -> dict[str, list[np.ndarray]]:
        """Return the head's outputs (see LossInput) without gradient.

        Args:
            rows: the rows of this rank; all ranks call this together, and a rank may have none.

        Returns:
            {output: values by row, float32 [T] or [T, K] each, 0 outside loss_mask}.
        """

    @abstractmethod
    def forward_backward(
        self,
        rows: list[Sequence],
        loss_fn: LossFn,
        *,
        rows_per_example: int = 1,
        record_outputs: Mapping[str, str] | None = None,
    ) -> Stats:
        """Add the gradient of a loss over all rows of all ranks to that of earlier calls.

        If the call fails, the whole gradient since the last `optim_step` is dropped: that of each
        adapter which has rows in the call.

        Args:
            rows: the rows of this rank; all ranks call this together, and a rank may have none.
            loss_fn: the loss.
            rows_per_example: consecutive rows that stay in one micro-batch, in their order;
                2 for pairs of a preferred and a rejected answer.
            record_outputs: {output: field}: outputs of this pass that become fields of the rows,
                without gradient, before the loss function is called. They replace a `forward`.

        Returns:
            The loss function's stats, summed.
        """

    def train_batch(
        self,
        rows: list[Sequence],
        loss_fn: LossFn,
        *,
        rows_per_example: int = 1,
        record_outputs: Mapping[str, str] | None = None,
    ) -> Stats:
        """Apply one update over all rows of all ranks: `forward_backward`, then `optim_step`.

        Returns:
            The stats of both.
        """
        stats = self.forward_backward(
            rows,
            loss_fn,
            rows_per_example=rows_per_example,
            record_outputs=record_outputs,
        )
        return stats | self.optim_step()

    def add_adapter(self, adapter: NewAdapter) -> TrainedWeights:
        """Add an adapter, which computes the rows that have its name, and return its weights.

        Rows of several adapters may be in one call. A frozen engine (`without_adapter`) computes
        them by the base model.

        Raises:
            UserError: this engine cannot have it, or its name is taken.
        """
        raise UserError(
            f"add_adapter '{adapter.name}': the model's parameters are trained, or no adapter is. "
            "Set engine.fsdp.lora.rank, or engine.fsdp.lora.only_named=true."
        )

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that `add_adapter` has added, with its optimizer and gradient."""
        raise NotImplementedError

    @abstractmethod
    def stream_weights(self, *, on_device: bool = False) -> Iterator[Named]:
        """Yield (name in the folder, full tensor) on rank 0, and nothing on other ranks.

        A tensor may be the parameter itself, which the next update changes.

        Args:
            on_device: yield tensors on the model's device, else contiguous tensors on the CPU.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a checksum of all parameters: 16 hex digits, equal on all ranks.

        It depends on the world size, and does not protect against deliberate changes. "": none.
        """


engines = Registry[type[TrainEngine]].built_in("train_engine")
