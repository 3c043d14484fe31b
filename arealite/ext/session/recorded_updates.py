"""The record of updates in a ledger: with the samples of the ledger, it repeats each of them.

A row is stored as its difference to the row that its sample makes, `Sample.row()`.
"""

from typing import Any

import msgspec
import numpy as np

from arealite.api.algorithm import KLConfig, LossConfig
from arealite.api.payloads import Payload
from arealite.api.trainer import PPOConfig
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base import config_tree
from arealite.ext.session.call_loss import Loss
from arealite.ext.session.sample_rows import Sample, SampleRow

ARRAYS = ("loss_mask", "routing", "top_ids", "is_truncated")
"""Attributes of rows with arrays, which a user may change."""
TABLE = "CREATE TABLE IF NOT EXISTS session_steps (step INTEGER PRIMARY KEY, updates BLOB)"
"""SQL: the table that a session adds to its ledger; updates = msgpack of RecordedUpdate."""


class RecordedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array as bytes."""

    dtype: str
    shape: list[int]
    content: bytes


class RecordedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a sample."""

    trajectory_id: str
    temperature: float
    reward: float | None
    fields: dict[str, float | RecordedArray | None]
    """Fields that the sample's row does not have, or has with other values. A number stands for
    equal values of all tokens; None: the row lacks the field."""
    arrays: dict[str, RecordedArray | None]
    """The arrays of ARRAYS that differ from those of the sample's row, by name."""


class RecordedBackward(msgspec.Struct, frozen=True, kw_only=True):
    """A call of `forward_backward`."""

    rows: list[RecordedRow]
    function: str
    """module:name of a function of the user; "": a loss by name."""
    loss: dict[str, Any]
    """Options of the loss (LossConfig)."""
    kl: dict[str, Any]
    """Options of its KL penalty (KLConfig)."""
    record_outputs: dict[str, str]


class RecordedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A call of `optim_step`, with the calls that have added its gradient."""

    backwards: list[RecordedBackward]
    lr: float | None
    optimizer: dict[str, Any]
    """Its options (OptimizerConfig)."""

    @property
    def rows(self) -> list[RecordedRow]:
        """All rows."""
        return [row for backward in self.backwards for row in backward.rows]


encode_updates = msgspec.msgpack.Encoder().encode
decode_updates = msgspec.msgpack.Decoder(list[RecordedUpdate]).decode


def record_backward(rows: list[SampleRow], loss: Loss) -> RecordedBackward:
    """Return the record of a call, before its outputs become fields of the rows."""
    return RecordedBackward(
        rows=[_record_row(row) for row in rows],
        function=loss.function_name,
        loss=config_tree.plain(loss.config),
        kl=config_tree.plain(loss.kl),
        record_outputs={**(loss.record_outputs or {})},
    )


def _record_row(row: SampleRow) -> RecordedRow:
    sample_row = row.sample.row()
    fields = dict[str, float | RecordedArray | None]()
    for name in sample_row.fields.keys() - row.fields.keys():
        fields[name] = None
    for name, user_values in row.fields.items():
        values = np.asarray(user_values)  # a list or a tensor works without a ledger, too
        if _record_array(values) != _record_array(sample_row.fields.get(name)):
            fields[name] = _record_field(values)
    arrays = dict[str, RecordedArray | None]()
    for name in ARRAYS:
        record = _record_array(getattr(row, name))
        if record != _record_array(getattr(sample_row, name)):
            arrays[name] = record
    return RecordedRow(
        trajectory_id=row.sample.trajectory_id,
        temperature=float(row.temperature),
        reward=None if row.reward is None else float(row.reward),
        fields=fields,
        arrays=arrays,
    )


def _record_field(values: np.ndarray) -> float | RecordedArray | None:
    is_float32 = values.dtype == np.float32 and values.ndim == 1
    if is_float32 and values.size and values.tobytes() == values[:1].tobytes() * len(values):
        return float(values[0])
    return _record_array(values)


def _record_array(array: np.ndarray | None) -> RecordedArray | None:
    if array is None:
        return None
    return RecordedArray(array.dtype.str, [*array.shape], array.tobytes())


def sample_of(trajectory_id: str, payload: Payload) -> Sample:
    """Return a sample from its payload in the ledger, without its texts."""
    tree = TrajectoryTree.decode(payload)
    (turn,) = tree.turns
    return Sample(
        prompt="",
        prompt_ids=np.frombuffer(tree.prompt, "<i4").tolist(),
        output_ids=np.frombuffer(turn.ids, "<i4").tolist(),
        logprobs=np.frombuffer(turn.logprobs, "<f4").tolist(),
        versions=np.frombuffer(turn.versions, "<i4").tolist(),
        stop_reason="",
        text="",
        temperature=turn.temperature,
        group="",
        trajectory_id=trajectory_id,
        routing=turn.routing,
    )


def row_of(record: RecordedRow, sample: Sample) -> SampleRow:
    """Return a row of a sample as it was recorded."""
    row = sample.row()
    row.temperature = record.temperature
    for name, field in record.fields.items():
        if field is None:
            del row.fields[name]
        elif isinstance(field, RecordedArray):
            row.fields[name] = _array_of(field)
        else:
            row.fields[name] = np.full(len(row.tokens), field, np.float32)
    for name, array in record.arrays.items():
        setattr(row, name, None if array is None else _array_of(array))
    return row


def _array_of(record: RecordedArray) -> np.ndarray:
    values = np.frombuffer(record.content, record.dtype)
    return values.reshape(record.shape).copy()


def loss_options(record: RecordedBackward, ppo: PPOConfig) -> tuple[LossConfig, KLConfig]:
    """Return the options of a recorded loss; `ppo` has their classes."""
    loss = config_tree.build(type(ppo.loss), record.loss)
    return loss, config_tree.build(type(ppo.kl), record.kl)
