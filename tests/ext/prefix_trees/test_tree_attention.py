"""Attention over prefix trees has the outputs and gradients of attention over separate rows."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from arealite.ext.prefix_trees import tree_attention
from arealite.ext.prefix_trees.packed_rows import PrefixTree
from arealite.ext.prefix_trees.prefix_tree import prefix_forest
from arealite.ext.prefix_trees.tree_attention import KernelCalls

CPU, HEADS, KV_HEADS, WIDTH = torch.device("cpu"), 4, 2, 8


@st.composite
def forests(draw: Any) -> list[np.ndarray]:
    """Draw rows of which each begins with a prefix of an earlier row."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    unit = draw(st.sampled_from([1, 5, 20]))  # lengths are multiples, so that many are equal
    rows = [rng.integers(0, 9, unit * rng.integers(1, 1 + 90 // unit))]
    for _ in range(draw(st.integers(0, 20))):
        begin = rows[rng.integers(len(rows))]
        begin = begin[: unit * rng.integers(0, len(begin) // unit + 1)]
        own = rng.integers(0, 9, unit * rng.integers(1, 1 + 60 // unit))
        rows.append(np.concatenate([begin, own]))
    return rows


def nested() -> list[np.ndarray]:
    """Return rows of nine equal trees, in which two nodes of a path have further branches."""
    rows = list[np.ndarray]()
    for trunk in (np.full(5, 10 * tree) for tree in range(9)):
        branch = np.concatenate([trunk, trunk + 1])
        tails = zip((trunk, branch, branch), (70, 50, 50), strict=True)
        rows += [np.concatenate([before, np.full(n, 2 + i)]) for i, (before, n) in enumerate(tails)]
    return rows


def groups() -> list[np.ndarray]:
    """Return rows of six small trees: two equal ones, which share a call, and four others."""
    rng, rows = np.random.default_rng(0), list[np.ndarray]()
    for prompt, answer in ((9, 20), (9, 20), (9, 5), (30, 3), (4, 6), (60, 2)):
        begin = rng.integers(0, 9, prompt)
        rows += [np.concatenate([begin, np.full(answer, 10 + i)]) for i in range(4)]
    return rows


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@settings(deadline=None)
@given(forests(), st.sampled_from([0, 96, 127]), st.sampled_from([0, 1, 96, 200]))
@example(nested(), 96, 0)
@example(groups(), 96, 0)
def test_attention_over_trees_equals_attention_over_rows(
    dtype: torch.dtype, tolerance: float, rows: list[np.ndarray], small: int, padding: int
) -> None:
    forest = prefix_forest(rows)
    tree = PrefixTree.of(forest, CPU)
    tree = tree.padded(padding) if padding else tree
    generator = torch.Generator().manual_seed(0)

    def random(length: int, heads: int) -> torch.Tensor:
        return torch.randn((length, heads, WIDTH), generator=generator, dtype=dtype)

    inputs = [random(tree.bounds[-1], n).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS)]
    weights = [random(len(row), HEADS) for row in rows]
    with patch.object(tree_attention, "SMALL_TREE", small):
        out = KernelCalls(tree).attend(*inputs, 0.4)
    total, expected = out.new_zeros(()), out.new_zeros(())
    for last, weight in zip(forest.last, weights, strict=True):
        places = torch.from_numpy(tree.paths[last])
        q, k, v = (each[places].transpose(0, 1)[None] for each in inputs)
        alone = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4, enable_gqa=True)
        alone = alone[0].transpose(0, 1)
        torch.testing.assert_close(alone, out[places], rtol=0, atol=tolerance)
        total = total + (out[places] * weight).sum()
        expected = expected + (alone * weight).sum()
    found = torch.autograd.grad(total, inputs)
    for one, other in zip(found, torch.autograd.grad(expected, inputs), strict=True):
        atol = tolerance * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=tolerance, atol=atol)


def test_small_trees_get_a_mask_and_larger_ones_branches() -> None:
    def group(first: int, prompt: int, answers: list[int]) -> list[np.ndarray]:
        begin = np.arange(first, first + prompt)
        return [np.concatenate([begin, np.full(n, i)]) for i, n in enumerate(answers)]

    rows = [
        *group(100, 8, [120]),  # as long as neither a small tree nor a run
        *group(200, 56, [20, 20]),  # 96 tokens
        *group(300, 57, [20, 20]),  # 97 tokens
        *group(400, 32, [0]),
        *group(500, 32, [0]),
        *group(600, 32, [0]),
        *group(700, 32, [0]),
        *group(800, 10, [0]),
        *group(900, 9, [0]),
        *group(1000, 7, [0]),
    ]
    calls = KernelCalls(PrefixTree.of(prefix_forest(rows), CPU)).calls
    shapes = [
        (call.rows, call.is_branch, call.is_token is not None, call.attn_mask is not None)
        for call in calls
    ]
    assert shapes == [
        (1, False, False, False),  # 128 tokens
        (4, False, False, False),  # four rows of 32, end to end
        (2, False, True, True),  # the small tree, and a chain of 77 tokens
        (1, False, False, False),  # the other answer of the larger tree
        (2, False, True, False),  # 10 and 9 tokens
        (1, False, False, False),  # 7 tokens are less than 3/4 of 10
        (1, True, False, False),
    ]
    assert all(isinstance(calls[i].queries, slice) for i in (0, 1, 3, 5, 6))
    assert (calls[-1].keys, calls[-1].queries) == (slice(224, 281), slice(301, 321))


@pytest.mark.parametrize("answer", [10, 30])  # with a mask, and with branches
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_outputs_and_gradients_are_close_to_float32(dtype: torch.dtype, answer: int) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, 50)
    rows = [np.concatenate([prompt, rng.integers(0, 9, answer)]) for _ in range(4)]
    tree = PrefixTree.of(prefix_forest(rows), CPU)
    kernel = KernelCalls(tree)
    assert any(call.is_branch for call in kernel.calls) == (answer == 30)
    shape, generator = (tree.bounds[-1], 4, WIDTH), torch.Generator().manual_seed(0)
    exact = [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]
    low = [each.detach().to(dtype).requires_grad_() for each in exact]
    outs = [kernel.attend(*each, 0.4) for each in (exact, low)]
    assert outs[1].dtype == dtype
    torch.testing.assert_close(outs[1].float(), outs[0], rtol=0.02, atol=0.02)
    for out in outs:
        out.sum().backward()
    for one, other in zip(low, exact, strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=0.05, atol=0.05)  # type: ignore[union-attr]
