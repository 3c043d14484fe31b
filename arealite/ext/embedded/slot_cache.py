"""The keys and values of all running requests, one row for each request.

Shape letters: S = rows, T = positions, H = key heads, D = head size, L = positions of a pass.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import Cache, DynamicLayer

ROW_BLOCK = 64
"""The cache holds a multiple of this many rows, so that it rarely grows."""
LENGTH_BLOCK = 16
"""The cache holds a multiple of this many positions. It grows by an eighth at least."""
Index = tuple[slice | Tensor, slice | Tensor]
"""Rows and positions of the cache."""


def round_up(number: int, block: int) -> int:
    """Return the smallest multiple of `block` that is at least `number`."""
    return -(-number // block) * block


class SlotCache(Cache):
    """Keys and values of the running requests: one tensor per layer, one row per request.

    The n running requests occupy rows 0 … n-1, so that attention reads a view, without pages or
    copies. When a request ends, the last row moves into its row. `start` sets where the next pass
    writes. Positions beyond a row's length hold stale numbers, which the attention mask hides.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])
        self._tensors_STHD: list[Tensor] = []
        """Keys and values of layer 0, of layer 1, …"""
        self._shape = (0, 0)
        self._index: Index = (slice(0), slice(0))
        self._width: int | None = None
        self._prefix_THD: list[Tensor] = []
        """Keys and values of a prefix that prompts share, in the order of `_tensors_STHD`."""

    def reserve(self, rows: int, length: int) -> None:
        """Extend the cache to `rows` requests of `length` positions; the contents stay."""
        old_rows, old_length = self._shape
        if rows <= old_rows and length <= old_length:
            return
        row_block = min(ROW_BLOCK, max(old_rows, 8))
        rows = max(old_rows, round_up(rows, row_block))
        if length > old_length:
            length = max(length, old_length + old_length // 8)
        length = max(old_length, round_up(length, LENGTH_BLOCK))
        self._shape = (rows, length)
        for i, old_STHD in enumerate(self._tensors_STHD):
            new_STHD = self._allocate(old_STHD, old_STHD.shape[2])
            new_STHD[:old_rows, :old_length] = old_STHD
            self._tensors_STHD[i] = new_STHD

    def _allocate(self, like: Tensor, num_heads: int) -> Tensor:
        """Return zeros in which all positions of a head are adjacent: attention is faster."""
        rows, length = self._shape
        head_size = like.shape[-1]
        zeros_SHTD = like.new_zeros((rows, num_heads, length, head_size))
        return zeros_SHTD.transpose(1, 2)

    def start(self, index: Index, *, width: int | None = None) -> None:
        """Prepare a forward pass: it writes at `index`, (rows, positions), as slices or tensors.

        Attention reads the first `width` positions of the rows; None: only the positions that this
        pass writes. Rows as a tensor are 0 … n-1.
        """
        self._index = index
        self._width = width

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values [rows, H, L, D]; return those that attention reads."""
        keys = self._update_tensor(2 * layer_idx, key_states)
        values = self._update_tensor(2 * layer_idx + 1, value_states)
        return keys, values

    def _update_tensor(self, index: int, new_SHLD: Tensor) -> Tensor:
        """Write into `_tensors_STHD[index]`; return the part that attention reads."""
        if index == len(self._tensors_STHD):
            self._tensors_STHD.append(self._allocate(new_SHLD, new_SHLD.shape[1]))
        tensor_STHD = self._tensors_STHD[index]
        tensor_STHD[self._index] = new_SHLD.transpose(1, 2)
        if self._width is None:
            return new_SHLD
        rows = self._index[0]
        if not isinstance(rows, slice):
            rows = slice(new_SHLD.shape[0])
        return tensor_STHD[rows, : self._width].transpose(1, 2)

    def copy_rows(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` positions of rows, all at once; moves: (source, target)."""
        if not moves:
            return
        sources = [source for source, _ in moves]
        targets = [target for _, target in moves]
        for tensor in self._tensors_STHD:
            tensor[targets, :length] = tensor[sources, :length]

    def store_prefix(self, row: int, length: int) -> None:
        """Copy the first `length` positions of a row for later requests."""
        self._prefix_THD = [tensor[row, :length].clone() for tensor in self._tensors_STHD]

    def load_prefix(self, rows: slice) -> None:
        """Copy the stored prefix into rows."""
        for tensor, prefix in zip(self._tensors_STHD, self._prefix_THD, strict=True):
            tensor[rows, : len(prefix)] = prefix

    def drop_prefix(self) -> None:
        """Drop the stored prefix and free its memory."""
        self._prefix_THD.clear()

    def drop(self) -> None:
        """Drop all keys and values and free their memory."""
        self._tensors_STHD.clear()
        self.drop_prefix()
        self._shape = (0, 0)
