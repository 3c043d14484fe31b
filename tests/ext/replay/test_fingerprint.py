"""Fingerprints of weights: every changed bit changes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from arealite.ext.replay import fingerprint as module
from arealite.ext.replay.fingerprint import fingerprint
from tests.impl.engine.helpers import make_engine

pytestmark = pytest.mark.usefixtures("group")
CPU = torch.device("cpu")


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, torch.Tensor]]:
    """Return two tensors of one shape with several chunks, and a small tensor of another dtype."""
    monkeypatch.setattr(module, "CHUNK", 64)
    module._weights.cache_clear()
    torch.manual_seed(0)
    found = {"a": torch.randn(7, 30), "b": torch.randn(7, 30)}
    yield found | {"c": torch.randn(5).bfloat16()}
    module._weights.cache_clear()


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_each_flipped_bit_changes_the_fingerprint(
    name: str, tensors: dict[str, torch.Tensor]
) -> None:
    bits = module._bits(tensors[name])
    seen = {fingerprint(tensors, CPU)}
    flips = 0
    for place in (0, 1, len(bits) // 2, len(bits) - 1):
        for bit in range(bits.element_size() * 8):
            flip = torch.tensor(1).to(bits.dtype) << bit
            bits[place] ^= flip
            seen.add(fingerprint(tensors, CPU))
            bits[place] ^= flip
            flips += 1
    assert len(seen) == flips + 1


def test_pairs_of_flipped_signs_change_the_fingerprint(tensors: dict[str, torch.Tensor]) -> None:
    before = fingerprint(tensors, CPU)
    for other in range(1, 64):
        tensors["a"].view(-1)[[0, other]] *= -1
        assert fingerprint(tensors, CPU) != before
        tensors["a"].view(-1)[[0, other]] *= -1
    assert fingerprint(tensors, CPU) == before


def test_positions_and_names_change_the_fingerprint(tensors: dict[str, torch.Tensor]) -> None:
    before = fingerprint(tensors, CPU)
    again = {name: tensors[name].clone() for name in ("c", "b", "a")}
    assert fingerprint(again, CPU) == before, "the order of the mapping does not count"
    assert fingerprint(tensors | {"a": tensors["b"], "b": tensors["a"]}, CPU) != before
    assert fingerprint({"d": tensors["a"], "b": tensors["b"], "c": tensors["c"]}, CPU) != before
    moved = tensors["a"].clone()
    moved.view(-1)[:128] = tensors["a"].view(-1)[:128].roll(64)
    assert fingerprint(tensors | {"a": moved}, CPU) != before, "two chunks have changed places"


def test_one_flipped_parameter_bit_changes_the_engine_fingerprint(model: Path) -> None:
    engine = make_engine(model)
    before = engine.fingerprint()
    assert make_engine(model, seed=7).fingerprint() == before
    *_, param = engine.module.parameters()
    module._bits(param)[-1] ^= 1
    assert engine.fingerprint() != before
