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
        self._held_STHD: list[torch.Tensor] = []
        """Keys and values of layer 0, of layer 1, …"""
        self._shape = (0, 0)
        self._index: Any = None
        self._width: int | None = None

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` requests of `length` positions, keeping what is held."""
        held_rows, held_length = self._shape
        if rows <= held_rows and length <= held_length:
            return
        block = min(BLOCK, max(held_rows, 8))
        rows = max(held_rows, -(-rows // block) * block)
        length = max(held_length, -(-length // BLOCK) * BLOCK)
        self._shape = (rows, length)
        for place, old in enumerate(self._held_STHD):
            new = old.new_zeros((rows, length, *old.shape[2:]))
            new[:held_rows, :held_length] = old
            self._held_STHD[place] = new

    def start(self, index: Any, *, width: int | None = None) -> None:
        """Prepare a forward pass: it writes at `index`, (rows, positions), as slices or tensors.

        Its attention reads the first `width` positions of the rows held; None: what it writes.
        """
        self._index, self._width = index, width

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new [rows, H, L, D] and return what its attention reads."""
        read = [key_states, value_states]
        for i, new in enumerate((key_states, value_states)):
            place = 2 * layer_idx + i
            if place == len(self._held_STHD):
                self._held_STHD.append(new.new_zeros((*self._shape, new.shape[1], new.shape[3])))
            held_STHD = self._held_STHD[place]
            held_STHD[self._index] = new.transpose(1, 2)
            if self._width is not None:
                read[i] = held_STHD[: new.shape[0], : self._width].transpose(1, 2)
        return read[0], read[1]

    def copy_rows(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` positions of rows, all at once; moves: (source, target)."""
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        for tensor in self._held_STHD if moves else ():
            tensor[targets, :length] = tensor[sources, :length]

    def drop(self) -> None:
        """Forget everything and give the memory back."""
        self._held_STHD.clear()
        self._shape = (0, 0)
