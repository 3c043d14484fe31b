"""Data of a client as training rows."""

from typing import Any

import numpy as np
import pytest

from arealite.base.errors import UserError
from arealite.ext.tinker import messages
from arealite.ext.tinker.datums import Datum, logprobs_of, read_datum, rows_of
from arealite.ext.tinker.named_losses import OUTPUT


def message(tokens: list[int], targets: Any, **inputs: Any) -> Any:
    """Return a Datum of the protocol."""
    datum = messages.make("Datum")
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    for name, values in {"target_tokens": targets, **inputs}.items():
        dtype = "<i8" if name == "target_tokens" else "<f4"
        array = np.array(values, dtype)
        tensor = datum.loss_fn_inputs[name]
        tensor.dense = array.tobytes()
        tensor.dtype = 2 if dtype == "<i8" else messages.FLOAT32
        tensor.shape.extend(array.shape)
    return datum


def read(datum: Any, loss: str = "cross_entropy") -> Datum:
    return read_datum(datum, loss, vocabulary=100, longest=16)


def test_shifted_targets_become_the_tokens_of_the_row() -> None:
    datum = read(message([1, 2, 3], [2, 3, 4], weights=[0, 1, 2]))

    (row,) = rows_of([datum], "a")
    assert row.tokens.tolist() == [1, 2, 3, 4]
    assert row.loss_mask.tolist() == [False, True, True, True]
    assert row.fields["weights"].tolist() == [0, 0, 1, 2]
    assert row.top_ids is None
    assert row.adapter == "a"
    assert row.temperature == 1.0


def test_other_targets_are_named_by_top_ids_in_all_rows_of_the_call() -> None:
    shifted = read(message([1, 2], [2, 3], weights=[1, 1]))
    padded = read(message([1, 2, 3], [0, 0, 9], weights=[0, 0, 1]))
    several = read(message([5], [[6, 7]], weights=[[0.25, 0.75]]))

    rows = rows_of([shifted, padded, several], "a")
    top_ids = [row.top_ids.tolist() for row in rows if row.top_ids is not None]
    assert top_ids == [
        [[-1, -1], [2, -1], [3, -1]],
        [[-1, -1], [0, -1], [0, -1], [9, -1]],
        [[-1, -1], [6, 7]],
    ]
    assert rows[2].fields["weights"].tolist() == [[0, 0], [0.25, 0.75]]
    for row in rows:
        assert row.top_ids is not None
        row.fields[OUTPUT] = np.where(row.top_ids < 0, -np.inf, row.top_ids).astype(np.float32)
    results = [values.tolist() for values in logprobs_of(rows, [shifted, padded, several])]
    assert results == [[2, 3], [0, 0, 9], [[6, 7]]]


@pytest.mark.parametrize(
    ("datum", "error"),
    [
        (message([1], [2]), "lack weights, which cross_entropy needs"),
        (message([1], [2], weights=[1], mask=[1]), "does not read mask"),
        (message([], [], weights=[]), "model_input has 0 tokens: use 1 to 15"),
        (message([1] * 16, [1] * 16, weights=[1] * 16), "model_input has 16 tokens"),
        (message([1, 2], [2], weights=[1]), r"shape \[1\]: use \[2\]"),
        (message([1], [2], weights=[1, 1]), r"weights: use finite numbers of the shape.*\[1\]"),
        (message([1], [2], weights=[np.nan]), "weights: use finite numbers"),
        (message([100], [2], weights=[1]), r"model_input: token ids must be in \[0, 100\)"),
        (message([-1], [2], weights=[1]), "model_input: token ids"),
        (message([1], [100], weights=[1]), "target_tokens: token ids"),
        (message([1], [[]], weights=[[]]), "1 to 256 targets"),
    ],
)
def test_wrong_datum_is_refused_by_one_line(datum: Any, error: str) -> None:
    with pytest.raises(UserError, match=error):
        read(datum)


def test_gspo_without_a_marked_target_is_refused() -> None:
    values: dict[str, list[Any]] = {"logprobs": [-1, -1], "advantages": [1, 1]}
    unmarked = message([1, 2], [2, -1], **values, sequence_ratio_mask=[0, 1])

    with pytest.raises(UserError, match="sequence_ratio_mask marks no target"):
        read(unmarked, "gspo")


def test_images_are_refused() -> None:
    datum = message([1], [2], weights=[1])
    datum.model_input.add().image = b""

    with pytest.raises(UserError, match="text tokens only"):
        read(datum)
