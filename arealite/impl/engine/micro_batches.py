"""Turns ragged training rows into one micro-batch of tensors, and results into rows.

The token at t is predicted by the hidden state at t − 1. Shape letters: B = rows (1 where they are
packed), T = tokens of a row, W = input width, N = loss tokens, row after row. S = tokens of all
rows, I = inputs of all rows, K = top ids of a token, R = bytes of a token's recorded experts.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from arealite.api.engine import Sequence
from arealite.api.engine_extension import MicroBatch, Placement, RowLayout
from arealite.base.errors import UserError

NO_RECORD = 255
"""Every byte of the routing record of a token that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatRows:
    """The tokens of all rows, one row after the other."""

    tokens_S: np.ndarray
    """int64"""
    loss_mask_S: np.ndarray
    row_S: np.ndarray
    """int64: the row of each token."""
    column_S: np.ndarray
    """int64: the position of each token in its row."""
    is_input_S: np.ndarray
    """bool: the last token of a row is no input, except in a row of one token, so that no row is
    empty."""
    num_inputs: np.ndarray
    """int64: the number of inputs of each row."""

    @classmethod
    def of(cls, rows: Seq[Sequence]) -> "_FlatRows":
        lengths = np.array([len(row.tokens) for row in rows])
        begins = np.cumsum(lengths) - lengths
        num_inputs = np.maximum(1, lengths - 1)
        tokens_S = np.concatenate([row.tokens for row in rows])
        row_S = np.repeat(np.arange(len(rows)), lengths)
        column_S = np.arange(len(tokens_S)) - begins[row_S]
        return cls(
            tokens_S=tokens_S.astype(np.int64),
            loss_mask_S=_loss_mask(rows),
            row_S=row_S,
            column_S=column_S,
            is_input_S=column_S < num_inputs[row_S],
            num_inputs=num_inputs,
        )

    def predictors(self) -> np.ndarray:
        """Return the index among the I inputs of the token before each loss token, int64 [N]."""
        first_inputs = np.cumsum(self.num_inputs) - self.num_inputs
        row_N = self.row_S[self.loss_mask_S]
        column_N = self.column_S[self.loss_mask_S]
        return first_inputs[row_N] + column_N - 1


def collate(
    rows: Seq[Sequence],
    device: torch.device,
    layout: RowLayout | None = None,
) -> MicroBatch:
    """Build the micro-batch of `rows`; without rows, one of a single token without loss.

    Args:
        rows: The rows.
        device: The device of the tensors.
        layout: Places the rows; None: they are padded.

    Raises:
        UserError: a row has temperature 0, at which tokens have no logprobs.
    """
    if not rows:
        no_loss = np.zeros(2, bool)
        two_tokens = np.zeros(2, np.int32)
        rows = [Sequence(tokens=two_tokens, loss_mask=no_loss, temperature=1.0)]
    temperatures = np.array([row.temperature for row in rows], np.float32)
    if temperatures.min() <= 0:
        raise UserError("sampling.temperature must be above 0 for tokens that are trained on.")
    flat = _FlatRows.of(rows)
    placement = layout.place(rows) if layout else _padded(flat)
    place_I = placement.place_I
    mask_S = flat.loss_mask_S
    row_N = flat.row_S[mask_S]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    fields = dict[str, torch.Tensor]()
    for name in rows[0].fields:
        field_S = np.concatenate([row.fields[name] for row in rows])
        fields[name] = put(field_S[mask_S].astype(np.float32))
    input_ids_BW = _spread(flat.tokens_S[flat.is_input_S], placement, fill=0)
    routing_BWR = None
    routing_SR = routing_of(rows)
    if routing_SR is not None:
        routing_IR = routing_SR[flat.is_input_S]
        routing_BWR = put(_spread(routing_IR, placement, fill=NO_RECORD))
    top_ids_SK = _records(rows, "top_ids", fill=-1)
    top_ids_NK = None
    is_truncated_N = None
    if top_ids_SK is not None:
        top_ids_NK = put(top_ids_SK[mask_S].astype(np.int64))
        is_truncated_S = _records(rows, "is_truncated", fill=False)
        if is_truncated_S is not None and is_truncated_S[mask_S].any():
            is_truncated_N = put(is_truncated_S[mask_S])
    row_ends = np.cumsum(flat.num_inputs)[:-1]
    return MicroBatch(
        input_ids_BW=put(input_ids_BW),
        attention=placement.attention,
        inputs=[put(place) for place in np.split(place_I, row_ends)],
        index_N=put(place_I[flat.predictors()]),
        targets_N=put(flat.tokens_S[mask_S]),
        temperature_N=put(temperatures[row_N]),
        rows_N=put(row_N),
        fields=fields,
        top_ids_NK=top_ids_NK,
        is_truncated_N=is_truncated_N,
        routing_BWR=routing_BWR,
        adapters=tuple(row.adapter for row in rows),
    )


def _spread(inputs: np.ndarray, placement: Placement, *, fill: int) -> np.ndarray:
    """Return the values [I, …] of the inputs as [B, W, …], `fill` elsewhere."""
    num_rows, width = placement.shape
    sizes = inputs.shape[1:]
    flat = np.full((num_rows * width, *sizes), fill, inputs.dtype)
    flat[placement.place_I] = inputs
    return flat.reshape(*placement.shape, *sizes)


def _padded(flat: _FlatRows) -> Placement:
    """Place each row on its own, at the left."""
    num_rows = len(flat.num_inputs)
    width = int(flat.num_inputs.max())
    place_S = flat.row_S * width + flat.column_S
    return Placement(
        shape=(num_rows, width),
        place_I=place_S[flat.is_input_S],
        attention={},
    )


def routing_of(rows: Seq[Sequence]) -> np.ndarray | None:
    """Return the recorded experts of all tokens, uint8 [S, R]; None if no row has a record."""
    return _records(rows, "routing", fill=NO_RECORD)


def _records(rows: Seq[Sequence], name: str, *, fill: int) -> np.ndarray | None:
    """Return a record of all tokens, [S, …], `fill` in rows without it; None if no row has it."""
    by_row: list[np.ndarray | None] = [getattr(row, name) for row in rows]
    first = next((record for record in by_row if record is not None), None)
    if first is None or 0 in first.shape[1:]:
        return None
    records = list[np.ndarray]()
    for row, record in zip(rows, by_row, strict=True):
        if record is None:
            shape = (len(row.tokens), *first.shape[1:])
            record = np.full(shape, fill, first.dtype)
        records.append(record)
    return np.concatenate(records)


def _loss_mask(rows: Seq[Sequence]) -> np.ndarray:
    """Return whether each token of the rows is a loss token, bool [S]."""
    masks = [row.loss_mask for row in rows]
    return np.concatenate(masks).astype(bool)


def _row_ends(rows: Seq[Sequence]) -> np.ndarray:
    """Return the index after the last token of each row but the last one."""
    lengths = [len(row.tokens) for row in rows]
    return np.cumsum(lengths)[:-1]


def scatter(values_N: torch.Tensor, rows: Seq[Sequence]) -> list[np.ndarray]:
    """Return the values [N, …] of the loss tokens by row, float32 [T, …] each, 0 elsewhere."""
    mask_S = _loss_mask(rows)
    values_S = np.zeros((len(mask_S), *values_N.shape[1:]), np.float32)
    values_S[mask_S] = values_N.float().cpu().numpy()
    return np.split(values_S, _row_ends(rows))
