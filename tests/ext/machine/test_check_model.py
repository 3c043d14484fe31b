"""`arealite check --model` compares the programs that compute a model, without a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from arealite.cli.main import main
from arealite.ext.machine import check_command
from arealite.ext.prefix_trees import attention
from arealite.ext.self_check import plain_copy
from tests.cli.test_preflight_adapter import RANK, tiny_adapter
from tests.cli.test_preflight_model import change_config, refused
from tests.models import tiny_mixture, tiny_model


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    """A refused model ends the process, which ends its process group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return tiny_mixture(tmp_path / "model", "deepseek_v3")


def test_sound_model_passes_without_a_run(
    mixture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_command.main(["--model", f"model.path={mixture}"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"compared   plain transformers: mean of a row .*, largest .* nats", told)
    assert "compared   server http://127.0.0.1" in told
    assert "ok: the trainer's log-probabilities are within the bounds" in told


def test_dtype_of_an_offline_trainer_gives_the_bound(tmp_path: Path) -> None:
    dtypes = ["trainer.offline.engine.fsdp.dtype=bfloat16", "model.dtype=bfloat16"]
    given = ["--config", "sft", f"model.path={tiny_model(tmp_path)}", *dtypes]
    assert check_command.main(["--model", *given]) == 0


def test_trainer_that_differs_is_a_fault(
    mixture: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_packable(model: Any) -> None:
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                buffer *= 0.5
        real(model)

    real = attention.check_packable
    monkeypatch.setattr(attention, "check_packable", check_packable)
    assert check_command.main(["--model", f"model.path={mixture}"]) == 1
    told = capsys.readouterr().out
    assert "Likely reason: rope theta:" in " ".join(told.split())
    assert told.endswith("not ok\n")


def test_server_that_is_not_embedded_is_compared_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model.path={tiny_model(tmp_path / 'model')}"]
    words += ["launcher.server_args=[llm_server.type=sglang]"]
    assert check_command.main(["--model", *words]) == 0
    assert "not compared: each run compares sglang itself" in capsys.readouterr().out


def test_nothing_compared_is_not_called_ok(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_copy, "LARGEST", 1)
    words = [f"model.path={tiny_model(tmp_path / 'model')}"]
    words += ["launcher.server_args=[llm_server.type=sglang]"]
    assert check_command.main(["--model", *words]) == 0
    told = capsys.readouterr().out
    assert "too large for a second copy" in told
    assert told.endswith("nothing was compared\n")


SIZE = "mean of a row .* nats"


@pytest.mark.parametrize(
    ("length", "of_server"), [(1, "not compared: <HTTPError 400"), (8, SIZE), (24, SIZE)]
)
def test_short_context_gets_short_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int, of_server: str
) -> None:
    model = tiny_model(tmp_path / "model")
    change_config(model, max_position_embeddings=length)
    assert check_command.main(["--model", f"model.path={model}"]) == 0
    told = capsys.readouterr().out
    assert re.search(f"compared   plain transformers: {SIZE}", told)
    assert re.search(f"compared   server .*: {of_server}", told)


def test_adapter_is_a_part_of_the_compared_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, model = tiny_adapter(tmp_path / "adapter"), tiny_model(tmp_path / "model")
    given = [f"model.path={model}", f"model.adapter={adapter}"]
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    assert main(["check", "--model", *given]) == 0
    assert "compared   server" in capsys.readouterr().out
    save_file({name: tensor * torch.nan for name, tensor in load_file(file).items()}, file)
    told = refused(capsys, "check", "--model", *given)
    assert re.search(r"model\.adapter: '.*layers\.0.*lora_A.*' has NaN or infinity\.", told)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weight_that_is_not_finite_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    model = tiny_model(tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = value
    save_file(tensors, file, metadata={"format": "pt"})
    told = refused(capsys, "check", "--model", f"model.path={model}")
    named = "'model.layers.1.mlp.up_proj.weight' has NaN or infinity. Download the folder again."
    assert told.endswith(f"model.path={model}: {named}")


PARALLEL = "trainer.ppo.engine.fsdp.context_parallel=2"
WITH_RANKS = [PARALLEL, "launcher.trainer_ranks=2"]
"""One rank is enough for the comparison."""
OPTIONS: list[tuple[list[str], dict[str, Any], str]] = [
    ([f"{RANK}=4"], {}, "'model.layers.0.mlp.experts' holds all its experts in one parameter"),
    ([PARALLEL], {}, "context_parallel=2 does not divide the 1 trainer ranks"),
    (WITH_RANKS, {"hidden_act": "swiglu9"}, "(KeyError: 'swiglu9')"),
    ([], {"layer_types": ["full_attention"]}, "number of `layer_types` (1)"),
]
"""Options of the run and fields of config.json, with the refusal."""


@pytest.mark.parametrize(("given", "fields", "says"), OPTIONS)
def test_what_a_run_refuses_is_refused_by_one_line(
    given: list[str],
    fields: dict[str, Any],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_mixture(tmp_path, "qwen3_moe")
    change_config(model, **fields)
    assert says in refused(capsys, "check", "--model", f"model.path={model}", *given)
