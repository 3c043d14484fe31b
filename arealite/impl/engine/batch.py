"""Turns ragged training rows into one micro-batch of tensors, and results into rows.

The token at t is predicted by the hidden state at t − 1. Shape letters: B = rows (1 where they are
packed), T = tokens of a row, W = input width, N = loss tokens, row after row.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from arealite.algo.prefix_tree import prefix_forest
from arealite.api.engine import Sequence
from arealite.base.errors import UserError
from arealite.impl.engine.tree_attention import PrefixTree


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass, on the engine's device."""

    input_ids_BW: torch.Tensor
    """int64: rows right-padded with 0, or packed prefix trees [1, W]. The last token of a row is no
    input."""
    attention: dict[str, object]
    """Further arguments of the decoder for packed rows; {} for padded ones."""
    inputs: list[torch.Tensor]
    """int64 for each row: positions of its inputs in the flattened [B · W] tokens."""
    index_N: torch.Tensor
    """int64: which of the flattened [B · W] hidden states predicts each loss token."""
    targets_N: torch.Tensor
    """int64: the loss tokens."""
    temperature_N: torch.Tensor
    rows_N: torch.Tensor
    fields: dict[str, torch.Tensor]
    own_N: torch.Tensor | None = None
    """int64: the loss tokens that this rank computes, of those in `rows_N` and `fields`; None:
    all. Only context parallelism divides them; `index_N`, targets and temperatures are its own."""
    routing_BWR: torch.Tensor | None = None
    """uint8: the recorded experts of each input, R bytes, 255 where none are recorded; None: no
    row has a record."""


def collate(rows: Seq[Sequence], device: torch.device, layout: str = "padded") -> MicroBatch:
    """Build the micro-batch of `rows`; without rows, one of a single token without loss.

    Raises:
        UserError: a row has temperature 0, at which tokens have no logprobs.
    """
    rows = rows or [Sequence(np.zeros(2, np.int32), np.zeros(2, bool), 1.0)]
    if any(row.temperature <= 0 for row in rows):
        raise UserError("sampling.temperature must be above 0 for tokens that are trained on.")
    lengths = np.array([len(row.tokens) for row in rows])
    tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    mask = np.concatenate([row.loss_mask for row in rows]).astype(bool)
    routing = _routing(rows)
    row_of = np.repeat(np.arange(len(rows)), lengths)
    column = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    # A row of one token has an input, too, so that no row is empty.
    widths = np.maximum(1, lengths - 1)
    is_input = column < widths[row_of]
    attention: dict[str, object] = {}
    if layout == "packed":
        forest = prefix_forest(input_items(rows))
        tree = PrefixTree.of(forest, device)
        shape, place = (1, tree.bounds[-1]), np.concatenate([tree.paths[n] for n in forest.last])
        positions = np.zeros(shape, np.int64)
        positions[0, place] = column[is_input]
        attention = {"position_ids": tree.put(positions), "prefix_tree": tree}
    else:
        shape = (len(rows), int(widths.max()))
        place = (row_of * shape[1] + column)[is_input]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def spread(values: np.ndarray, fill: int) -> torch.Tensor:
        laid = np.full((shape[0] * shape[1], *values.shape[1:]), fill, values.dtype)
        laid[place] = values[is_input]
        return put(laid.reshape(*shape, *values.shape[1:]))

    before = (np.cumsum(widths) - widths)[row_of[mask]] + column[mask] - 1
    return MicroBatch(
        input_ids_BW=spread(tokens, 0),
        attention=attention,
        inputs=[put(each) for each in np.split(place, np.cumsum(widths)[:-1])],
        index_N=put(place[before]),
        targets_N=put(tokens[mask]),
        temperature_N=put(np.array([row.temperature for row in rows], np.float32)[row_of[mask]]),
        rows_N=put(row_of[mask]),
        fields={
            name: put(np.concatenate([row.fields[name] for row in rows])[mask].astype(np.float32))
            for name in rows[0].fields
        },
        routing_BWR=None if routing is None else spread(routing, 255),
    )


def input_items(rows: Seq[Sequence]) -> list[np.ndarray]:
    """Return the inputs of each row as items to compare: tokens, with their recorded experts."""
    keys = [row.tokens for row in rows]
    if (routing := _routing(rows)) is not None:
        ids = np.concatenate(keys).astype(np.int32)[:, None].view(np.uint8)
        items = np.concatenate([ids, routing], 1).view(f"V{4 + routing.shape[1]}")[:, 0]
        keys = np.split(items, np.cumsum([len(key) for key in keys])[:-1])
    return [key[: max(1, len(key) - 1)] for key in keys]


def _routing(rows: Seq[Sequence]) -> np.ndarray | None:
    """Return the recorded experts of all tokens, row after row; None if no row has a record."""
    size = next((row.routing.shape[1] for row in rows if row.routing is not None), 0)
    none = [np.full((len(row.tokens), size), 255, np.uint8) for row in rows]
    found = [n if row.routing is None else row.routing for row, n in zip(rows, none, strict=True)]
    return np.concatenate(found) if size else None


def scatter(values_N: torch.Tensor, rows: Seq[Sequence]) -> list[np.ndarray]:
    """Return the values of the loss tokens by row, float32 [T] each, 0 elsewhere."""
    mask = np.concatenate([row.loss_mask for row in rows]).astype(bool)
    flat = np.zeros(len(mask), np.float32)
    flat[mask] = values_N.float().cpu().numpy()
    return np.split(flat, np.cumsum([len(row.tokens) for row in rows])[:-1])
