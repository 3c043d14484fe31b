"""Buckets keep every bit of tensors of any dtypes and order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.ext.weights.buckets import pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool]
SHAPES = st.lists(st.integers(0, 4), max_size=3)
MODELS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=8)


def tensors(model: list[tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        f"t{i}": torch.randint(0, 2, shape, generator=draw).to(dtype)
        for i, (dtype, shape) in enumerate(model)
    }


@given(MODELS, st.integers(0, 300))
def test_packed_tensors_are_unpacked_bitwise_equal(
    model: list[tuple[torch.dtype, list[int]]], max_bytes: int
) -> None:
    sent = tensors(model)
    buckets = list(pack(iter(sent.items()), max_bytes))
    got = {name: t for b in buckets for name, t in unpack(b.layout, b.flat)}
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert torch.equal(got[name], tensor)
    for bucket in buckets:
        assert bucket.flat.dtype == torch.uint8
        assert bucket.flat.numel() == bucket.layout.num_bytes
        assert bucket.layout.num_bytes <= max_bytes or len(bucket.layout.names) == 1


def test_pack_reads_at_most_one_bucket_ahead() -> None:
    taken: list[int] = []

    def stream():
        for i in range(6):
            taken.append(i)
            yield f"t{i}", torch.zeros(4)

    buckets = pack(stream(), 32)
    assert next(buckets).layout.names == ["t0", "t1"]
    assert taken == [0, 1, 2], "one tensor tells that the bucket is full"


def test_slice_of_a_larger_tensor_is_packed_without_its_base() -> None:
    whole = torch.arange(12.0).view(3, 4)
    (bucket,) = pack(iter({"column": whole[:, 1]}.items()), 1 << 20)
    assert dict(unpack(bucket.layout, bucket.flat))["column"].tolist() == [1.0, 5.0, 9.0]
    assert bucket.flat.numel() == 12
