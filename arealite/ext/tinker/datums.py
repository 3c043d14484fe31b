"""Turns a client's data into training rows, and the engine's outputs into results.

A datum has T input tokens and T targets: input i predicts target i. Usually target i is input
i + 1, and the row is the inputs and the last target. Otherwise the row names its targets by
`top_ids`.
Shape letters: T = inputs, K = targets of an input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arealite.api.engine import Sequence as Row
from arealite.base.errors import UserError
from arealite.ext.tinker import messages
from arealite.ext.tinker.named_losses import HAS_TARGET, OUTPUT, SEQUENCE_MASK, find_loss

TARGETS = "target_tokens"
MAX_TARGETS = 256
"""Largest number of targets of an input."""


@dataclass(frozen=True, kw_only=True)
class Datum:
    """A datum of a client."""

    tokens_T: np.ndarray
    """int32"""
    targets: np.ndarray
    """int64, [T] or [T, K]; -1: none."""
    inputs: Mapping[str, np.ndarray]
    """float32, as `targets`: the inputs of the loss."""

    @property
    def is_shifted(self) -> bool:
        """Whether each target but the last one is the next input."""
        return self.targets.ndim == 1 and np.array_equal(self.targets[:-1], self.tokens_T[1:])


def read_datum(message: Any, loss: str, *, vocabulary: int, longest: int) -> Datum:
    """Read a datum.

    Args:
        message: The protobuf message `Datum`.
        loss: Name of the loss.
        vocabulary: Number of token ids.
        longest: Largest number of tokens.

    Raises:
        UserError: It is not plain text, an input of the loss is missing or of another shape, or a
            token is not in the vocabulary.
    """
    parts = list[np.ndarray]()
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text") or len(chunk.encoded_text.tokens) % 4:
            raise UserError("model_input: this service takes text tokens only, no images or audio.")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens_T = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not 0 < len(tokens_T) < longest:
        raise UserError(f"model_input has {len(tokens_T)} tokens: use 1 to {longest - 1}.")
    names = find_loss(loss).inputs
    lacking = [name for name in (TARGETS, *names) if name not in message.loss_fn_inputs]
    if lacking:
        raise UserError(f"loss_fn_inputs lack {', '.join(lacking)}, which {loss} needs.")
    others = message.loss_fn_inputs.keys() - {TARGETS, *names}
    if others:
        raise UserError(
            f"loss_fn_inputs: {loss} does not read {', '.join(sorted(others))}. Leave it out."
        )
    targets = messages.array_of(message.loss_fn_inputs[TARGETS]).astype(np.int64)
    if targets.shape[:1] != tokens_T.shape or targets.ndim > 2:
        raise UserError(
            f"{TARGETS} has the shape {[*targets.shape]}: use [{len(tokens_T)}], the number of "
            f"input tokens, or [{len(tokens_T)}, K]."
        )
    if targets.ndim == 2 and not 0 < targets.shape[1] <= MAX_TARGETS:
        raise UserError(f"{TARGETS}: use 1 to {MAX_TARGETS} targets for an input.")
    _check_ids("model_input", tokens_T, 0, vocabulary)
    _check_ids(TARGETS, targets, -1, vocabulary)
    inputs = {name: _read_input(message, name, targets) for name in names}
    return Datum(tokens_T=tokens_T, targets=targets, inputs=inputs)


def _read_input(message: Any, name: str, targets: np.ndarray) -> np.ndarray:
    """Return an input of the loss, float32 as the targets; UserError if it is unusable."""
    values = messages.array_of(message.loss_fn_inputs[name]).astype(np.float32)
    if values.shape != targets.shape or not np.isfinite(values).all():
        raise UserError(
            f"{name}: use finite numbers of the shape of {TARGETS}, {[*targets.shape]}."
        )
    if name == SEQUENCE_MASK and not values[targets >= 0].any():
        raise UserError(
            f"{name} marks no target: mark with 1 each target that counts for the ratio."
        )
    return values


def _check_ids(name: str, ids: np.ndarray, lowest: int, vocabulary: int) -> None:
    if ids.min() < lowest or ids.max() >= vocabulary:
        raise UserError(f"{name}: token ids must be in [0, {vocabulary}), the vocabulary.")


def row_of(datum: Datum, adapter: str, *, num_targets: int) -> Row:
    """Return the training row of a datum; its loss tokens are all tokens but the first.

    Args:
        datum: The datum.
        adapter: Name of the adapter that computes it.
        num_targets: K, the targets of an input in this call; 0: the next inputs are the targets.
    """
    last = max(0, int(datum.targets.flat[-1])) if num_targets == 0 else 0
    tokens = np.append(datum.tokens_T, np.int32(last)).astype(np.int32)
    has_target = (datum.targets >= 0).astype(np.float32)
    inputs = {**datum.inputs, HAS_TARGET: has_target}
    top_ids = None
    if num_targets:
        top_ids = _field(datum.targets.astype(np.int32), num_targets, fill=-1)
    return Row(
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) > 0,
        temperature=1.0,
        fields={name: _field(values, num_targets) for name, values in inputs.items()},
        top_ids=top_ids,
        adapter=adapter,
    )


def _field(values: np.ndarray, num_targets: int, *, fill: int = 0) -> np.ndarray:
    """Return values of the targets as a field of the row, [T + 1] or [T + 1, K]."""
    if not num_targets:
        return np.pad(values, (1, 0))
    columns = values.reshape(len(values), -1)
    missing = num_targets - columns.shape[1]
    return np.pad(columns, ((1, 0), (0, missing)), constant_values=fill)


def rows_of(data: Sequence[Datum], adapter: str) -> list[Row]:
    """Return the training rows of the data of a call."""
    num_targets = 0
    if not all(datum.is_shifted for datum in data):
        num_targets = max(datum.targets[0].size for datum in data)
    return [row_of(datum, adapter, num_targets=num_targets) for datum in data]


def logprobs_of(rows: Sequence[Row], data: Sequence[Datum]) -> list[np.ndarray]:
    """Return the log-probability of each target, float32 as `Datum.targets`; 0 where none is."""
    results = list[np.ndarray]()
    for row, datum in zip(rows, data, strict=True):
        num_targets = datum.targets[0].size
        columns = row.fields[OUTPUT][1:].reshape(len(datum.targets), -1)
        values = columns[:, :num_targets].reshape(datum.targets.shape)
        results.append(np.where(datum.targets >= 0, values, np.float32(0)))
    return results
