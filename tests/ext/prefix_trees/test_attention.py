"""Packed and padded rows have equal losses and gradients; arguments of flash attention are
checked without a GPU."""

from __future__ import annotations

import inspect
import itertools
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from arealite.api.engine import Sequence
from arealite.api.engine_config import FSDPConfig
from arealite.api.engine_extension import EngineSetup
from arealite.base.errors import UserError
from arealite.ext.prefix_trees import attention
from arealite.ext.prefix_trees.extension import prefix_trees
from arealite.ext.prefix_trees.packed_rows import PackedRows, PrefixTree
from arealite.ext.prefix_trees.prefix_tree import prefix_forest
from arealite.impl.engine.micro_batches import collate
from tests.impl.engine.helpers import assert_close, gradients, make_engine, make_rows
from tests.models import tiny_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("group")


def rows_with_short_ones() -> list[Sequence]:
    """Return twelve rows, then rows of one, two, one and two tokens; one token has no loss."""
    rows = make_rows()
    for at, length in ((0, 1), (3, 2), (7, 1), (15, 2)):
        mask = np.arange(length) == 1
        fields = {name: np.full(length, 0.05, np.float32) for name in rows[0].fields}
        rows.insert(
            at,
            Sequence(
                tokens=np.arange(5 + at, 5 + at + length, dtype=np.int32),
                loss_mask=mask,
                temperature=0.7,
                fields=fields,
            ),
        )
    return rows


def packs(layout: str, module: Any, *, device: torch.device, dtype: str) -> bool:
    """Return whether the extension packs the rows of a model; it then sets the attention."""
    extension = prefix_trees(
        EngineSetup(
            config=FSDPConfig(layout=layout, dtype=dtype),  # type: ignore[arg-type]
            module=module,
            source=Path(),
            head="lm",
            device=device,
            is_trained=True,
            adapter=None,
        )
    )
    if extension is None:
        return False
    extension.change_layers()
    return extension.layout is not None


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many": {"max_tokens_per_microbatch": 50},
    "checkpointing": {"gradient_checkpointing": True},
    "value": {"head": "value"},
    "sharded": {"cpu_offload": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_and_padded_rows_have_equal_gradients(variant: str, model: Path) -> None:
    rows = rows_with_short_ones()
    both = []
    for layout in ("padded", "packed"):
        engine = make_engine(model, layout=layout, **VARIANTS[variant])
        assert (engine.layout is not None) == (layout == "packed")
        both.append((*gradients(engine, rows), engine.forward(rows)))
    (expected, expected_stats, outputs), (got, got_stats, packed_outputs) = both
    assert_close(got, expected)
    assert got_stats["loss"] == pytest.approx(expected_stats["loss"], abs=1e-6)
    assert got_stats["computed_tokens"] < sum(max(1, len(row.tokens) - 1) for row in rows)
    assert got_stats["tokens"] == expected_stats["tokens"] < expected_stats["computed_tokens"]
    for name, values in outputs.items():
        for one, other in zip(values, packed_outputs[name], strict=True):
            np.testing.assert_allclose(other, one, atol=2e-5)


def test_rank_without_rows_has_zero_gradients(model: Path) -> None:
    engine = make_engine(model, layout="packed")
    found, stats = gradients(engine, [])
    assert stats["microbatches"] == 1.0
    assert all(float(grad.abs().max()) == 0.0 for grad in found.values())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("nemotron", {}),  # does not pass the bounds of rows on
        ("doge", {}),  # builds its own masks
        ("phimoe", {"num_local_experts": 4, "sliding_window": 5}),  # does not pass its window on
    ],
)
def test_unpackable_model_family_is_refused_at_once_or_padded(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model(tmp_path, family=family, tie_word_embeddings=False, **options)
    with pytest.raises(UserError, match=r"Attention cannot be packed: .*layout=padded"):
        make_engine(path, layout="packed")
    module, cuda = make_engine(path).module, torch.device("cuda")
    before = module.config._attn_implementation
    assert not packs("auto", module, device=cuda, dtype="bfloat16")
    assert module.config._attn_implementation == before


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0}),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            },
        ),
    ],
)
def test_rope_that_depends_on_other_rows_is_refused_for_long_rows(
    family: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"max_position_embeddings": 64 if family == "phi3" else 32}
    sizes |= {"original_max_position_embeddings": 32} if family == "phi3" else {}
    rope = {"rope_theta": 10000.0} | rope
    path = tiny_model(tmp_path, family=family, rope_parameters=rope, **sizes)
    engine, rows = make_engine(path), make_rows()
    short = [row for row in rows if len(row.tokens) <= 32]
    assert 0 < len(short) < len(rows)
    engine.forward(short)
    with pytest.raises(UserError, match=r"beyond 32 depend on .* llm_server.context_length=32"):
        engine.forward(rows)


def test_sliding_window_stays_within_each_row(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    path = tiny_model(tmp_path, init_std=0.1, **window)
    rows = make_rows(6)
    found = [
        gradients(make_engine(path, layout=layout), rows)[0] for layout in ("padded", "packed")
    ]
    assert_close(found[1], found[0])
    without = make_engine(tiny_model(tmp_path / "full", init_std=0.1), layout="packed")
    other = gradients(without, rows)[0]["model.layers.1.self_attn.q_proj.weight"]
    mine = found[1]["model.layers.1.self_attn.q_proj.weight"]
    assert float((other - mine).abs().max()) > 1e-3 * float(mine.abs().max())


def test_rows_do_not_attend_to_other_rows(model: Path) -> None:
    rows = make_rows(3)
    engine = make_engine(model, layout="packed")
    before = engine.forward(rows)["logprobs"]
    rows[0].tokens[:] = 9
    after = engine.forward(rows)["logprobs"]
    assert np.abs(after[0] - before[0]).max() > 1e-2
    for one, other in zip(before[1:], after[1:], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_collate_packs_rows() -> None:
    def row(*tokens: int) -> Sequence:
        mask = np.arange(len(tokens)) >= 1
        return Sequence(tokens=np.array(tokens, np.int32), loss_mask=mask, temperature=1.0)

    batch = collate([row(5, 6, 7), row(8), row(9, 10)], CPU, PackedRows(CPU))
    assert batch.input_ids_BW.tolist() == [[5, 6, 8, 9]]
    assert batch.index_N.tolist() == [0, 1, 3]
    assert batch.targets_N.tolist() == [6, 7, 10]
    assert batch.attention["position_ids"].tolist() == [[0, 1, 0, 0]]
    tree: Any = batch.attention["prefix_tree"]
    queries, keys, *longest = tree.flash_bounds
    assert queries.tolist() == keys.tolist() == [0, 2, 3, 4] and queries.dtype == torch.int32
    assert longest == [2, 2] and tree.keys is None
    assert collate([row(5, 6, 7), row(8)], CPU).attention == {}


def test_packed_model_accepts_an_explicit_attention_mask(model: Path) -> None:
    """The shared server calls the trainer's module in this way."""
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    outputs = []
    for layout in ("padded", "packed"):
        decoder = make_engine(model, layout=layout).module.get_decoder()
        with torch.no_grad():
            outputs.append(decoder(input_ids=ids, attention_mask=mask).last_hidden_state)
    torch.testing.assert_close(*outputs)


def test_layout_auto_packs_on_cpus_and_16_bit_models_on_cuda_if_supported(model: Path) -> None:
    module = make_engine(model).module
    cuda, low = torch.device("cuda"), "bfloat16"
    module.set_attn_implementation("sdpa")
    assert not packs("auto", module, device=cuda, dtype="float32")
    assert module.config._attn_implementation == "sdpa"
    assert packs("auto", module, device=CPU, dtype=low)
    module.config.layer_types = ["linear_attention", "full_attention"]
    assert not packs("auto", module, device=cuda, dtype=low)
    with pytest.raises(UserError, match=r"cannot be packed: use engine\.fsdp\.layout=padded"):
        packs("packed", module, device=CPU, dtype=low)
    module.config.layer_types = ["full_attention"] * 2
    assert packs("auto", module, device=cuda, dtype=low)
    assert module.config._attn_implementation == attention.NAME


def test_packed_attention_refuses_unknown_arguments() -> None:
    some = torch.zeros(1, 2, 3, 8)
    tree = PrefixTree.of(prefix_forest([np.arange(3)]), CPU)
    with pytest.raises(UserError, match=r"cannot be packed \(position_bias\)"):
        attention.attend(
            torch.nn.Identity(), some, some, some, None, prefix_tree=tree, position_bias=some
        )


CAPPED: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 0.5, "head_dim": 8, "sliding_window": 5},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 5},
}


@pytest.mark.parametrize("family", CAPPED)
def test_packed_rows_with_capped_scores_or_sinks_equal_padded_ones(
    family: str, tmp_path: Path
) -> None:
    path = tiny_model(tmp_path, family=family, **CAPPED[family])
    rows = rows_with_short_ones()
    engines = [make_engine(path, layout=layout) for layout in ("padded", "packed")]
    expected, got = (gradients(engine, rows)[0] for engine in engines)
    assert_close(got, expected, tolerance=1e-4)
    seen = banded(9, 0)[None, None]  # the shared server passes a boolean mask, eager adds one
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    states = list[torch.Tensor]()
    for engine, mask in ((engines[0], added), (engines[1], seen), (engines[1], added)):
        masks = {"full_attention": mask, "sliding_attention": mask}
        ids = torch.arange(5, 14)[None]
        with torch.no_grad():
            output = engine.module.get_decoder()(input_ids=ids, attention_mask=masks)
        states.append(output.last_hidden_state)
    for other in states[1:]:
        torch.testing.assert_close(other, states[0], atol=1e-4, rtol=1e-4)


ROWS = [[1, 2, 3, 4, 5], [6], [7, 8, 9, 1]], [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9], [5]]
"""Rows without a common prefix, and rows of which two share a prefix of four tokens."""


def given(rows: list[list[int]]) -> tuple[list[torch.Tensor], PrefixTree]:
    """Return query of 4 heads, key and value of 2, [N, heads, D], and trees of 10 tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = (10, 4, 8), (10, 2, 8), (10, 2, 8)
    qkv = [torch.randn(shape, generator=generator) for shape in shapes]
    return qkv, PrefixTree.of(prefix_forest([np.array(row) for row in rows]), CPU)


def by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Compute softmax attention whose causal mask and window end with the keys of each row."""
    result = torch.empty_like(query)
    heads = query.shape[1] // key.shape[1]
    parts = zip(pairwise(bounds.tolist()), pairwise(key_bounds.tolist()), strict=True)
    for (start, end), (first, last) in parts:
        for at in range(start, end):
            stop = last - end + at + 1
            left = first if options["left"] < 0 else max(first, stop - 1 - options["left"])
            for head in range(query.shape[1]):
                scores = key[left:stop, head // heads] @ query[at, head] * options["scale"]
                result[at, head] = scores.softmax(0) @ value[left:stop, head // heads]
    return result


def banded(length: int, window: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window or length))


@pytest.mark.parametrize("window", [0, 1, 2, 5])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("how", ["torch 2.13", "torch 2.11", "flash_attn"])
def test_flash_attention_gets_the_right_arguments(
    how: str, rows: list[list[int]], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, tree = given(rows)
    scores = attention.ScoreOptions(scale=0.3)
    expected = torch.empty_like(qkv[0])
    for path in map(torch.from_numpy, tree.paths):
        row = (tensor[path].transpose(0, 1)[None] for tensor in qkv)
        whole = attention._row(*row, banded(len(path), window), scores)
        expected[path] = whole[0].transpose(0, 1)
    four_d = [tensor.transpose(0, 1)[None] for tensor in qkv]
    options = {"prefix_tree": tree, "sliding_window": window, "scaling": 0.3}
    ours, _ = attention.attend(torch.nn.Identity(), *four_d, None, **options)
    torch.testing.assert_close(ours[0], expected)

    def new(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        assert (window_size[1], enable_gqa) == (0, True)
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        return by_hand(q, k, v, cu_q, cu_k, scale=scale, left=window_size[0])

    def old(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size):  # type: ignore[no-untyped-def]
        assert q.shape[1:] == k.shape[1:]
        return new(q, k, v, cu_q, cu_k, max_q, max_k,
                   scale=scale, window_size=window_size, enable_gqa=True)  # fmt: skip

    def package(q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size):  # type: ignore[no-untyped-def]
        assert causal
        return new(q, k, v, cu_q, cu_k, max_q, max_k,
                   scale=softmax_scale, window_size=window_size, enable_gqa=True)  # fmt: skip

    function = {"torch 2.13": new, "torch 2.11": old, "flash_attn": package}[how]
    monkeypatch.setattr(attention, "varlen_attn", function)
    monkeypatch.setattr(attention, "KNOWN", inspect.signature(function).parameters)
    monkeypatch.setattr(attention, "HAS_FLASH_ATTN", how == "flash_attn")
    module = ModuleType("flash_attn")
    vars(module)["flash_attn_varlen_func"] = function
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    got = attention._flash(qkv, tree, scores, window)
    torch.testing.assert_close(got, expected)


def test_flash_attention_of_torch_accepts_the_shapes() -> None:
    """Run forward and backward of the installed torch's function on meta tensors."""
    query, key, value = (
        torch.empty(10, heads, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    trees = [given(rows)[1] for rows in ROWS]
    for window, tree in itertools.product((0, 3), trees):
        tree.device = torch.device("meta")
        scores = attention.ScoreOptions(scale=0.125)
        output = attention._flash([query, key, value], tree, scores, window)
        assert output.shape == (10, 4, 64)
        output.sum().backward()
    assert key.grad is not None
    assert key.grad.shape == key.shape
