"""A quantised server computes with rounded weights, and is not compared with the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.api.launcher import LauncherConfig
from arealite.base.errors import UserError
from arealite.ext.embedded.quantization import LEVELS, matrix_names, round_rows
from arealite.ext.embedded.quantized_runs import check_run
from arealite.ext.embedded.weight_loading import ServedWeights, load_model, stage_weights
from tests.fakes.embedded import running, server_config

FACTS = RunFacts(model={}, shapes={}, free_bytes=0)
INT8 = "llm_server.embedded.quantization=int8"


def loaded(folder: Path, dtype: str = "float32") -> Any:
    return load_model(str(folder), dtype=dtype, device="cpu")[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_has_at_most_255_numbers_and_keeps_its_largest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 4000).to(dtype)
    weight[3] = 0.0
    rounded = weight.clone()
    round_rows(rounded)
    step = weight.float().abs().amax(-1) / LEVELS
    for row, exact, size in zip(rounded, weight, step, strict=True):
        assert len(row.unique()) <= 2 * LEVELS + 1
        half_ulp = row.abs().max().float() * torch.finfo(dtype).eps
        assert (row.float() - exact.float()).abs().max() <= size / 2 + half_ulp
    assert torch.equal(rounded[3], weight[3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_of_layers_are_rounded_at_the_start_and_after_an_update(
    folders: list[Path], dtype: str
) -> None:
    model = loaded(folders[0], dtype)
    weights = ServedWeights(model, folders[0], quantizes=True)
    rounded_names = matrix_names(model)
    assert rounded_names and all(".layers." in name for name in rounded_names)
    for folder in folders[:2]:
        if folder is folders[1]:
            stage_weights(weights, str(folder))()
        exact = loaded(folder, dtype).state_dict()
        for name, tensor in model.state_dict().items():
            expected = exact[name].clone()
            if name in rounded_names:
                round_rows(expected)
                assert not torch.equal(expected, exact[name])
            assert torch.equal(tensor, expected), name


async def test_server_reports_its_quantization(folders: list[Path], tmp_path: Path) -> None:
    config = server_config(folders[0], tmp_path / "names")
    embedded = replace(config.llm_server.embedded, quantization="int8")
    config = replace(config, llm_server=replace(config.llm_server, embedded=embedded))
    async with running(config) as server, aiohttp.ClientSession() as http:
        async with http.get(f"{server.address}/server_info") as answer:
            assert (await answer.json())["quantization"] == "int8"
        served = server.engine.decoder.model.state_dict()
    exact = loaded(folders[0]).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(served[name], exact[name])


def run_of(num_servers: int = 1, server_args: str = INT8, **publisher: Any) -> ExperimentConfig:
    config = ExperimentConfig(
        launcher=LauncherConfig(llm_servers=num_servers, server_args=[server_args])
    )
    ppo = config.trainer.ppo
    ppo = replace(ppo, publisher=replace(ppo.publisher, **publisher))
    return replace(config, trainer=replace(config.trainer, ppo=ppo))


@pytest.mark.parametrize("publisher", [{}, {"canary": False}, {"self_check": False}])
def test_run_that_compares_a_quantised_server_is_refused(publisher: dict[str, bool]) -> None:
    with pytest.raises(UserError) as refused:
        check_run(run_of(**publisher), FACTS)
    text = str(refused.value)
    assert text.startswith("llm_server.embedded.quantization=int8") and "\n" not in text
    assert text.endswith("publisher.self_check=false trainer.ppo.publisher.canary=false.")


def test_other_runs_are_accepted() -> None:
    off = {"canary": False, "self_check": False}
    for config in (run_of(**off), run_of(0), run_of(server_args="llm_server.port=0")):
        assert list(check_run(config, FACTS)) == []
