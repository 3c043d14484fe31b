"""Ranks that share the tokens of rows equal one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from arealite.base.errors import UserError
from arealite.ext.models.context_parallel import ContextGroup
from tests.impl.engine import worker
from tests.impl.engine.helpers import (
    CONTEXTS,
    add_routing,
    add_top_ids,
    assert_close,
    gradients,
    make_engine,
    make_rows,
    weights,
)
from tests.models import tiny_mixture, tiny_model
from tests.ranks import run_ranks

pytestmark = [pytest.mark.usefixtures("group")]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models whose attention has windows, sinks, and values of other width."""
    path = tmp_path_factory.mktemp("families")
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    tiny_model(path / "window", init_std=0.1, **window)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    tiny_model(path / "gpt_oss", init_std=0.1, family="gpt_oss", sliding_window=5, **experts)
    tiny_mixture(path / "deepseek_v3", "deepseek_v3", init_std=0.1)
    return path


@pytest.fixture(scope="module", params=[2, 4])
def outs(
    request: pytest.FixtureRequest, families: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    path, world = tmp_path_factory.mktemp("ranks"), request.param
    ranks = [{"WORLD_SIZE": str(world), "RANK": str(rank)} for rank in range(world)]
    assert run_ranks(worker.main, ("contexts", path, str(families)), ranks) == [0] * world
    return [torch.load(file, weights_only=False) for file in sorted(path.glob("out-*.pt"))]


@pytest.mark.processes
@pytest.mark.parametrize("name", CONTEXTS)
def test_ranks_that_share_rows_equal_one_rank(
    name: str, outs: list[dict[str, Any]], families: Path
) -> None:
    (family, options), rows, low = CONTEXTS[name], make_rows(), name == "low"
    if "routed" in name:
        add_routing(rows)
    if "top" in name:
        add_top_ids(rows, size=7, truncated=0.4)
    engine = make_engine(families / family, **options)
    outputs = engine.forward(rows)
    record = None if engine.head == "value" else {"logprobs": "prox_logprobs"}
    expected, stats = gradients(engine, rows, updates=True, record_outputs=record)
    for group in {2, len(outs)}:
        found = [out[f"{name} of {group}"] for out in outs]
        for kind, values in outputs.items():
            theirs = [row for each in found for row in each["forward"].get(kind, [])]
            for ours, other in zip(values, theirs, strict=True):
                np.testing.assert_allclose(other, ours, atol=0.1 if low else 1e-5)
        assert_close(found[0]["gradients"], expected, tolerance=3e-2 if low else 1e-5)
        assert_close(found[0]["weights"], weights(engine), tolerance=2e-2 if low else 1e-3)
        assert all(each["stats"] == found[0]["stats"] for each in found)
        routing = ("routing_matched", "routing_compared") if "routed" in name else ()
        for key in ("loss", "grad_norm", "tokens", *routing):
            expect = pytest.approx(stats[key], rel=3e-2 if low else 1e-4, abs=1e-6)
            assert found[0]["stats"][key] == expect, key
        recorded = [row for each in found for row in each["recorded"]]
        for ours, other in zip(rows, recorded, strict=True):
            np.testing.assert_allclose(
                other, ours.fields["prox_logprobs"], atol=0.1 if low else 1e-5
            )


@pytest.mark.parametrize(
    ("family", "sizes", "error"),
    [
        ("mamba", {}, "MambaForCausalLM cannot share a row's tokens"),
        ("bamba", {"mamba_n_heads": 8, "mamba_d_head": 8}, "needs all of them"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of conv"),
        ("deepseek_v32", {}, r"layers of (indexed|deepseek_sparse)_attention"),
        ("qwen2", {"num_attention_heads": 3, "hidden_size": 24}, "does not divide the 3 attention"),
        ("llama4_text", {"num_attention_heads": 4}, "Llama4TextAttention needs all of them"),
        ("bloom", {}, "BloomForCausalLM cannot share a row's tokens"),
    ],
)
def test_model_that_cannot_share_rows_is_refused(
    family: str, sizes: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32} | sizes
    config = CONFIG_MAPPING[family](**settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match=error):
        ContextGroup(2, model, torch.device("cpu")).change_layers()


def test_size_that_does_not_divide_the_ranks_is_refused(families: Path) -> None:
    with pytest.raises(UserError, match="context_parallel=2 does not divide the 1 trainer ranks"):
        make_engine(families / "window", context_parallel=2)
