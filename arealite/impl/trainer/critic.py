"""Builds the critic's rows from a batch, and stores the critic's values in the batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from arealite.api.engine import Lengths, Sequence
from arealite.impl.trainer.batch import TrainBatch


def critic_rows(batch: TrainBatch) -> tuple[list[Sequence], Lengths]:
    """Return the critic's rows, over all sampled tokens, and the row lengths of every rank.

    The last row of a truncated episode has an additional token. Its value is the value of the state
    in which the episode was truncated.
    """
    cut = {i for i, header in enumerate(batch.headers) if header.truncated}
    rows: list[Sequence] = []
    for trajectory in batch.local:
        pairs = zip(trajectory.rows, trajectory.sampled, strict=True)
        rows += [Sequence(row.tokens, mask_T, row.temperature) for row, mask_T in pairs]
        if trajectory.index in cut:
            last = rows[-1]
            last.tokens = np.append(last.tokens, last.tokens[-1:])
            last.loss_mask = np.append(last.loss_mask, True)
    return rows, batch.lengths(range(len(batch.headers)), longer=cut)


def store_values(batch: TrainBatch, values: Seq[np.ndarray]) -> None:
    """Set the field `values` of the batch's rows from the critic's output for `critic_rows`."""
    begin = 0
    for trajectory in batch.local:
        output = values[begin : begin + len(trajectory.rows)]
        for row, values_T in zip(trajectory.rows, output, strict=True):
            row.fields["values"] = values_T[: len(row.tokens)]
        if batch.headers[trajectory.index].truncated:
            trajectory.bootstrap = float(output[-1][-1])
        begin += len(trajectory.rows)
