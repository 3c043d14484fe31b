"""Keys and values of the running requests: one tensor a layer, one row a request, no holes.

Requests of different lengths share one forward pass without pages or copies: the running ones hold
rows 0 … n-1, so that what attention reads is a view, and a freed row is filled by the last one.

Shape letters: S = rows held, T = positions held, L = prompt length, H = key heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicLayer

BLOCK = 64
"""Rows and positions are held in multiples of this, so that growing is rare."""


class SlotCache(Cache):
    """A transformers cache whose next write place is set before each forward pass.

    Positions behind a row's length hold stale numbers; the attention mask hides them.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])
        self._keys_STHD: list[torch.Tensor] = []
        self._values_STHD: list[torch.Tensor] = []
        self._shape = (0, 0)
        self._first_row: int | None = None
        self._index: tuple[torch.Tensor, torch.Tensor] | None = None
        self._width = 0

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` requests of `length` positions, keeping what is held."""
        held_rows, held_length = self._shape
        if rows <= held_rows and length <= held_length:
            return
        block = min(BLOCK, max(held_rows, 8))
        rows = max(held_rows, -(-rows // block) * block)
        length = max(held_length, -(-length // BLOCK) * BLOCK)
        self._shape = (rows, length)
        for tensors in (self._keys_STHD, self._values_STHD):
            for layer, old in enumerate(tensors):
                new = old.new_zeros((rows, length, *old.shape[2:]))
                new[: old.shape[0], : old.shape[1]] = old
                tensors[layer] = new

    def start_prefill(self, first_row: int) -> None:
        """The next forward pass writes whole prompts into the rows from `first_row` on."""
        self._first_row = first_row

    def start_decode(self, rows: torch.Tensor, positions: torch.Tensor, width: int) -> None:
        """The next forward pass writes one position of each row and reads the first `width`."""
        self._first_row = None
        self._index = (rows, positions)
        self._width = width

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new [rows, H, L, D] and return what its attention reads."""
        del args, kwargs
        if layer_idx == len(self._keys_STHD):
            for tensors, new in ((self._keys_STHD, key_states), (self._values_STHD, value_states)):
                tensors.append(new.new_zeros((*self._shape, new.shape[1], new.shape[3])))
        keys, values = self._keys_STHD[layer_idx], self._values_STHD[layer_idx]
        if self._first_row is not None:
            rows = slice(self._first_row, self._first_row + key_states.shape[0])
            keys[rows, : key_states.shape[2]] = key_states.transpose(1, 2)
            values[rows, : key_states.shape[2]] = value_states.transpose(1, 2)
            return key_states, value_states
        assert self._index is not None
        keys.index_put_(self._index, key_states[:, :, 0])
        values.index_put_(self._index, value_states[:, :, 0])
        read = (slice(0, key_states.shape[0]), slice(0, self._width))
        return keys[read].transpose(1, 2), values[read].transpose(1, 2)

    def copy_rows(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` positions of rows, all at once; moves: (source, target)."""
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        for tensor in (*self._keys_STHD, *self._values_STHD) if moves else ():
            tensor[targets, :length] = tensor[sources, :length]

    def drop(self) -> None:
        """Forget everything and give the memory back."""
        self._keys_STHD.clear()
        self._values_STHD.clear()
        self._shape = (0, 0)
