"""Rows of the self-check, and the comparison of two programs that scored them.

Shape letters: B = rows, T = tokens of the longest row.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arealite.api.engine import Sequence

BOUNDS = {"float32": (1e-3, 1e-2), "float16": (0.02, 0.25), "bfloat16": (0.15, 2.0)}
"""Largest differences by the coarsest dtype: mean of a row, and of any token. They are several
times those of random models with large weights (bfloat16: 0.03 and 0.57; float32: 1e-6, 6e-6)."""


def masked(rows: Seq[Sequence]) -> np.ndarray:
    """Return an array [B, T]: 0 in the loss masks of the rows, NaN elsewhere."""
    made_BT = np.full((len(rows), max(len(row.tokens) for row in rows)), np.nan)
    for line, row in zip(made_BT, rows, strict=True):
        line[: len(row.tokens)][row.loss_mask] = 0.0
    return made_BT


@dataclass(frozen=True)
class Comparison:
    """Logprobs of the same tokens from the trainer and from another program."""

    other: str
    """The other program: `plain transformers`, or `server` and its address."""
    rows: list[Sequence]
    ours_BT: np.ndarray
    """The trainer's; NaN where a token has none."""
    theirs_BT: np.ndarray
    dtype: str
    """The coarsest dtype of both programs, which gives the bound."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """The server's description of itself; {} of plain transformers."""

    @property
    def address(self) -> str:
        """The server's address."""
        return self.other.rpartition(" ")[2]

    @property
    def errors_BT(self) -> np.ndarray:
        """Absolute differences; 0 where a token has only one logprob."""
        return np.nan_to_num(np.abs(self.ours_BT - self.theirs_BT))

    @property
    def means_B(self) -> np.ndarray:
        """The mean difference of each row."""
        counts_B = np.isfinite(self.theirs_BT - self.ours_BT).sum(1)
        return self.errors_BT.sum(1) / np.maximum(1, counts_B)

    def fits(self, dtype: str) -> bool:
        """Return whether the differences are within the bounds of a dtype."""
        mean, most = BOUNDS[dtype]
        return bool(self.means_B.max() <= mean and self.errors_BT.max() <= most)

    @property
    def is_equal(self) -> bool:
        """Whether the differences are within the bounds, and no logprob is NaN."""
        is_scored = np.isfinite(self.ours_BT[~np.isnan(masked(self.rows))]).all()
        return bool(is_scored) and self.fits(self.dtype)

    @property
    def text(self) -> str:
        """The differences in words."""
        return f"mean {self.means_B.max():.2g}, largest {self.errors_BT.max():.2g} nats"

    @property
    def begin(self) -> int | None:
        """The first position at which tokens differ; None if no token's difference is too large.

        A position is that of the hidden state: 0 if the token depends on one token only.
        """
        columns = np.flatnonzero(self.errors_BT.max(0) > BOUNDS[self.dtype][1])
        return int(columns[0]) - 1 if len(columns) else None
