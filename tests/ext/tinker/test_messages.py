"""Messages of the protocol, against bytes that the public SDK 0.38 wrote."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.base.errors import UserError
from arealite.ext.tinker import messages

DENSE = bytes.fromhex(
    "0a016d10071a6a0a0c0a0a0a0801000000020000000a080a060a040300000012300a0d7461726765745f746f6b65"
    "6e73121f0a180200000000000000030000000000000004000000000000001802220103121e0a0777656967687473"
    "12130a0c000000000000803f0000003f1801220103220d63726f73735f656e74726f70792a1d0a12636c69705f6c"
    "6f775f7468726573686f6c6411cdccccccccccec3f3a1f0a12636c69705f6c6f775f7468726573686f6c64120909"
    "cdccccccccccec3f"
)
SPARSE = bytes.fromhex(
    "0a016d10071ac6010a100a0e0a0c010000000200000003000000125f0a0d7461726765745f746f6b656e73124e12"
    "460a1005000000000000000600000000000000122000000000000000000100000000000000010000000000000002"
    "000000000000001a1001000000000000000800000000000000180222020309"
    "12510a07776569676874731246123e0a080000803f0000803f122000000000000000000100000000000000010000"
    "000000000002000000000000001a1001000000000000000800000000000000180122020309220d63726f73735f65"
    "6e74726f7079"
)


def test_request_of_the_sdk_is_read() -> None:
    request = messages.parse("ForwardBackwardRequest", DENSE)

    assert (request.model_id, request.seq_id, request.loss_fn) == ("m", 7, "cross_entropy")
    assert dict(request.loss_fn_config) == {"clip_low_threshold": 0.9}
    assert request.loss_fn_config_v2["clip_low_threshold"].number == 0.9
    (datum,) = request.data
    chunks = [np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in datum.model_input]
    assert [chunk.tolist() for chunk in chunks] == [[1, 2], [3]]
    assert messages.array_of(datum.loss_fn_inputs["target_tokens"]).tolist() == [2, 3, 4]
    assert messages.array_of(datum.loss_fn_inputs["weights"]).tolist() == [0.0, 1.0, 0.5]


def test_sparse_tensors_have_no_target_and_no_weight_where_they_list_nothing() -> None:
    (datum,) = messages.parse("ForwardBackwardRequest", SPARSE).data

    targets = messages.array_of(datum.loss_fn_inputs["target_tokens"])
    assert targets.shape == (3, 9)
    assert targets[0, 1] == 5
    assert targets[2, 8] == 6
    assert (targets == -1).sum() == 25
    weights = messages.array_of(datum.loss_fn_inputs["weights"])
    assert weights.sum() == 2
    assert weights[0, 1] == weights[2, 8] == 1


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        request = messages.parse("ForwardBackwardRequest", raw)
        for datum in request.data:
            for tensor in datum.loss_fn_inputs.values():
                messages.array_of(tensor)
    except UserError:
        pass


@given(
    values=st.binary(max_size=32),
    row_ends=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    columns=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4), max_size=3),
    dtype=st.integers(0, 5),
)
def test_any_tensor_is_read_or_refused(
    values: bytes,
    row_ends: list[int],
    columns: list[int],
    shape: list[int],
    dtype: int,
) -> None:
    dense = messages.make("Tensor", dense=values, dtype=dtype, shape=shape)
    sparse = messages.make("Tensor", dtype=dtype, shape=shape)
    sparse.sparse_csr.values = values
    sparse.sparse_csr.crow_indices = np.array(row_ends, "<i8").tobytes()
    sparse.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()

    for tensor in (dense, sparse):
        with contextlib.suppress(UserError):
            messages.array_of(tensor)


@pytest.mark.parametrize(
    ("row_ends", "columns", "num_values"),
    [
        ([0, 2**40], [0], 1),
        ([0, 1], [-1], 1),
        ([1, 0], [0], 1),
        ([0, 2], [0, 1], 1),
        ([0], [], 0),
    ],
)
def test_cells_outside_a_sparse_tensor_are_refused(
    row_ends: list[int], columns: list[int], num_values: int
) -> None:
    tensor = messages.make("Tensor", dtype=2, shape=[1, 2])
    tensor.sparse_csr.values = np.zeros(num_values, "<i8").tobytes()
    tensor.sparse_csr.crow_indices = np.array(row_ends, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
    with pytest.raises(UserError, match=r"a sparse tensor of shape \[1, 2\]"):
        messages.array_of(tensor)


def test_large_sparse_tensor_is_refused_before_it_is_made() -> None:
    tensor = messages.make("Tensor", dtype=messages.FLOAT32, shape=[2**20, 2**20])
    tensor.sparse_csr.values = b""

    with pytest.raises(UserError, match="too large"):
        messages.array_of(tensor)


def test_record_has_the_arrays_of_all_data_one_after_the_other() -> None:
    record = messages.record_of(
        {"logprobs": [np.array([[1.0, 2.0]]), np.array([[3.0, 4.0], [5, 6]])]}
    )

    field = record.fields["logprobs"]
    assert record.num_datums == 2
    assert np.frombuffer(field.data, "<f4").tolist() == [1, 2, 3, 4, 5, 6]
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 8, 24]
    assert list(field.trailing_shape) == [2]


def test_empty_places_of_top_tokens_have_the_values_that_the_sdk_expects() -> None:
    top = messages.top_logprobs(np.array([[7, -1]]), np.array([[-0.5, -np.inf]]))

    assert np.frombuffer(top.token_ids, "<i4").tolist() == [7, 0]
    assert np.frombuffer(top.logprobs, "<f4").tolist() == [-0.5, -99999.0]
    assert (top.length, top.k) == (1, 2)
