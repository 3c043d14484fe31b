"""Protobuf messages of the protocol: requests of `forward_backward`, and results that have arrays.

Names and numbers of the fields are those that the `tinker` SDK 0.38 sends and reads. Only the
fields that the service uses are here; protobuf skips all others. Arrays are little-endian bytes.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import numpy as np

from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.ext.tinker.bodies import TensorBody

PACKAGE = "tinker"
FIELDS: Mapping[str, str] = {
    "Sparse": "values:bytes=1 crow_indices:bytes=2 col_indices:bytes=3",
    "Tensor": "dense:bytes=1 sparse_csr:Sparse=2 dtype:int32=3 shape:int64*=4",
    "EncodedText": "tokens:bytes=1",
    "Chunk": "encoded_text:EncodedText=1 image:bytes=2 dmel:bytes=3",
    "Datum": "model_input:Chunk*=1 loss_fn_inputs:Tensor%=2",
    "LossOption": "number:double=1 text:string=2",
    "ForwardBackwardRequest": (
        "model_id:string=1 seq_id:int32=2 data:Datum*=3 loss_fn:string=4 loss_fn_config:double%=5 "
        "forward_only:bool=6 loss_fn_config_v2:LossOption%=7"
    ),
    "BatchedTensor": "data:bytes=1 offsets:bytes=2 dtype:int32=3 trailing_shape:int64*=4",
    "ArrayRecord": "type_tag:string=1 fields:BatchedTensor%=2 num_datums:int64=3",
    "ForwardBackwardOutput": (
        "loss_fn_output_type:string=1 loss_fn_outputs:ArrayRecord*=2 metrics:double%=3"
    ),
    "TopkLogprobs": "token_ids:bytes=1 logprobs:bytes=2 k:uint32=3 length:uint32=4",
    "SampledSequence": (
        "stop_reason:int32=1 tokens:bytes=2 logprobs:bytes=3 topk_sampled_logprobs:TopkLogprobs=4"
    ),
    "SampleResponse": (
        "sequences:SampledSequence*=1 prompt_logprobs:bytes=2 topk_prompt_logprobs:TopkLogprobs=3 "
        "prompt_cache_hit_tokens:int32=4 target_prompt_logprobs:Tensor=5"
    ),
}
"""The fields of each message, as NAME:TYPE=NUMBER. `*` is a list, `%` a map with string keys."""
STOP_REASONS = {"stop": 0, "length": 1}
DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32 = 1
INT64 = 2
EMPTY_LOGPROB = -99999.0
"""Log-probability of a place without a token, in `TopkLogprobs`; its id is 0."""


@cache
def message_types() -> Mapping[str, Any]:
    """Return the class of each message.

    Raises:
        UserError: protobuf is not installed.
    """
    import_optional("google.protobuf", extra_requirement("tinker"))
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="arealite/tinker.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            _add_field(message, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in FIELDS
    }


def _add_field(message: Any, text: str) -> None:
    """Add a field of FIELDS to the description of a message."""
    name, _, type_and_number = text.partition(":")
    type_name, _, number = type_and_number.partition("=")
    kind = type_name[-1] if type_name[-1] in "*%" else ""
    type_name = type_name.rstrip("*%")
    field = message.field.add(name=name, number=int(number), label=1 if not kind else 3)
    if kind != "%":
        _set_type(field, type_name)
        return
    entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
    entry = message.nested_type.add(name=entry_name)
    entry.options.map_entry = True
    _set_type(entry.field.add(name="key", number=1, label=1), "string")
    _set_type(entry.field.add(name="value", number=2, label=1), type_name)
    field.type = field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{message.name}.{entry_name}"


def _set_type(field: Any, type_name: str) -> None:
    if type_name in FIELDS:
        field.type = field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{type_name}"
    else:
        field.type = getattr(field, f"TYPE_{type_name.upper()}")


def parse(name: str, raw: bytes) -> Any:
    """Decode a message.

    Raises:
        UserError: The bytes are no such message.
    """
    from google.protobuf.message import DecodeError

    message = message_types()[name]()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise UserError(f"the body is no {name}: {error}") from error
    return message


def make(name: str, **fields: object) -> Any:
    """Return a message."""
    return message_types()[name](**fields)


def array_of(tensor: Any) -> np.ndarray:
    """Return a `Tensor` as an array; -1 or 0.0 where a sparse one lists nothing.

    Raises:
        UserError: Its bytes do not fit its shape, or it is of an unknown type.
    """
    dtype = DTYPES.get(tensor.dtype)
    shape = tuple(tensor.shape)
    if dtype is None:
        raise UserError(f"a tensor has the type {tensor.dtype}. Send float32 or int64.")
    if tensor.HasField("sparse_csr"):
        return _dense(tensor.sparse_csr, dtype, shape)
    try:
        return np.frombuffer(tensor.dense, dtype).reshape(shape or (-1,))
    except ValueError as error:
        raise UserError(f"a tensor of shape {list(shape)}: {error}") from error


def tensor_of(body: TensorBody) -> Any:
    """Return a tensor of token ids as a message."""
    tensor = make("Tensor", dtype=INT64, shape=body.shape)
    values = np.array(body.data, "<i8").tobytes()
    if body.sparse_crow_indices is None:
        tensor.dense = values
        return tensor
    tensor.sparse_csr.values = values
    tensor.sparse_csr.crow_indices = np.array(body.sparse_crow_indices, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(body.sparse_col_indices, "<i8").tobytes()
    return tensor


def with_values(tensor: Any, values: np.ndarray) -> Any:
    """Return a float32 tensor with the shape and the cells of another one."""
    changed = make("Tensor")
    changed.CopyFrom(tensor)
    changed.dtype = FLOAT32
    if tensor.HasField("sparse_csr"):
        cells = _cells(tensor.sparse_csr, len(values))
        changed.sparse_csr.values = values[cells].astype("<f4").tobytes()
    else:
        changed.dense = values.astype("<f4").tobytes()
    return changed


def _dense(sparse: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return a sparse matrix as a dense one."""
    fill = 0 if dtype.kind == "f" else -1
    try:
        num_rows, num_columns = shape
        if num_rows * num_columns > MAX_DENSE:
            raise ValueError("it is too large")
        dense = np.full(shape, fill, dtype)
        rows, columns = _cells(sparse, num_rows)
        dense[rows, columns] = np.frombuffer(sparse.values, dtype).reshape(len(columns))
    except (ValueError, IndexError) as error:
        raise UserError(f"a sparse tensor of shape {list(shape)}: {error}") from error
    return dense


def _cells(sparse: Any, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column of each listed cell of a sparse matrix.

    Raises:
        ValueError: They are no cells of a matrix with so many rows.
    """
    row_ends = np.frombuffer(sparse.crow_indices, "<i8")
    columns = np.frombuffer(sparse.col_indices, "<i8")
    lowest = min(row_ends.min(initial=0), columns.min(initial=0))
    if lowest < 0 or row_ends.max(initial=0) > len(columns) or len(row_ends) != num_rows + 1:
        raise ValueError("a row end or a column is missing or out of range")
    return np.repeat(np.arange(num_rows), np.diff(row_ends)), columns


MAX_DENSE = 2**24
"""Elements of a sparse matrix that is made dense."""


def record_of(arrays: Mapping[str, list[np.ndarray]]) -> Any:
    """Return an `ArrayRecord` with a float32 array of each datum for each name."""
    record = make("ArrayRecord", num_datums=len(next(iter(arrays.values()))))
    for name, values in arrays.items():
        flat = [np.ascontiguousarray(value, "<f4") for value in values]
        ends = np.cumsum([0, *(value.nbytes for value in flat)])
        record.fields[name].data = b"".join(value.tobytes() for value in flat)
        record.fields[name].offsets = ends.astype("<i8").tobytes()
        record.fields[name].dtype = FLOAT32
        record.fields[name].trailing_shape.extend(values[0].shape[1:])
    return record


def top_logprobs(ids_NK: np.ndarray, logprobs_NK: np.ndarray) -> Any:
    """Return `TopkLogprobs`; an id of -1 is an empty place."""
    is_empty = ids_NK < 0
    length, k = ids_NK.shape
    return make(
        "TopkLogprobs",
        token_ids=np.where(is_empty, 0, ids_NK).astype("<i4").tobytes(),
        logprobs=np.where(is_empty, EMPTY_LOGPROB, logprobs_NK).astype("<f4").tobytes(),
        k=k,
        length=length,
    )


def serialized(message: Any) -> bytes:
    """Encode a message; equal messages have equal bytes."""
    return cast("bytes", message.SerializeToString(deterministic=True))
