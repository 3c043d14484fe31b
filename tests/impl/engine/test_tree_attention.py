"""Attention over prefix trees has the outputs and gradients of attention over separate rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from arealite.algo.prefix_tree import prefix_forest
from arealite.impl.engine.tree_attention import PrefixTree, TreeAttention

CPU, HEADS, KV_HEADS, WIDTH = torch.device("cpu"), 4, 2, 8


@st.composite
def forests(draw: Any) -> list[np.ndarray]:
    """Draw rows of which each begins with a prefix of an earlier row."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    unit = draw(st.sampled_from([1, 5, 20]))  # lengths are multiples: runs have equally many keys
    rows = [rng.integers(0, 9, unit * rng.integers(1, 1 + 90 // unit))]
    for _ in range(draw(st.integers(0, 20))):
        begin = rows[rng.integers(len(rows))]
        begin = begin[: unit * rng.integers(0, len(begin) // unit + 1)]
        own = rng.integers(0, 9, unit * rng.integers(1, 1 + 60 // unit))
        rows.append(np.concatenate([begin, own]))
    return rows


def nested() -> list[np.ndarray]:
    """Return rows of which tokens are below two nodes with equally many keys."""
    rows = list[np.ndarray]()
    for trunk in (np.full(5, 10 * tree) for tree in range(9)):
        branch = np.concatenate([trunk, trunk + 1])
        tails = zip((trunk, branch, branch), (70, 50, 50), strict=True)
        rows += [np.concatenate([before, np.full(n, 2 + i)]) for i, (before, n) in enumerate(tails)]
    return rows


@settings(deadline=None)
@given(forests())
@example(nested())
def test_attention_over_trees_equals_attention_over_rows(rows: list[np.ndarray]) -> None:
    forest = prefix_forest(rows)
    tree = PrefixTree.of(forest, CPU)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        shape = tree.bounds[-1], heads, WIDTH
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = random(HEADS), random(KV_HEADS), random(KV_HEADS)
    weights = [torch.randn(len(row), HEADS, WIDTH, dtype=torch.float64) for row in rows]
    out = TreeAttention.apply(*inputs, tree, 0.4)  # type: ignore[no-untyped-call]
    total = out.new_zeros(())
    for last, weight in zip(forest.last, weights, strict=True):
        total = total + (out[torch.from_numpy(tree.paths[last])] * weight).sum()
    found = torch.autograd.grad(total, inputs)
    expected = out.new_zeros(())
    for last, weight in zip(forest.last, weights, strict=True):
        places = torch.from_numpy(tree.paths[last])
        q, k, v = (each[places].transpose(0, 1)[None] for each in inputs)
        alone = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4, enable_gqa=True)
        torch.testing.assert_close(alone[0].transpose(0, 1), out[places], rtol=0, atol=1e-12)
        expected = expected + (alone[0].transpose(0, 1) * weight).sum()
    for one, other in zip(found, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * float(other.abs().max()))


@pytest.mark.parametrize("answer", [10, 30])  # with a mask, and with branches
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_outputs_and_gradients_are_close_to_float32(dtype: torch.dtype, answer: int) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, 50)
    rows = [np.concatenate([prompt, rng.integers(0, 9, answer)]) for _ in range(4)]
    tree = PrefixTree.of(prefix_forest(rows), CPU)
    assert any(call.is_branch for call in tree.calls) == (answer == 30)
    exact = [torch.randn(tree.bounds[-1], 4, WIDTH, requires_grad=True) for _ in range(3)]
    low = [each.detach().to(dtype).requires_grad_() for each in exact]
    outs = [TreeAttention.apply(*each, tree, 0.4) for each in (exact, low)]  # type: ignore[no-untyped-call]
    assert outs[1].dtype == dtype
    torch.testing.assert_close(outs[1].float(), outs[0], rtol=0.02, atol=0.02)
    for out in outs:
        out.sum().backward()
    for one, other in zip(low, exact, strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=0.05, atol=0.05)  # type: ignore[union-attr]
