"""The dtype that `auto` chooses, and the configs that have it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.cli import configs
from arealite.cli.configs import fast_dtype


def set_gpu(monkeypatch: pytest.MonkeyPatch, *, is_there: bool, has_bfloat16: bool) -> None:
    announced = configs._announced_dtype.__wrapped__
    monkeypatch.setattr(configs, "_announced_dtype", cache(announced))
    monkeypatch.setattr(configs, "has_bfloat16", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: has_bfloat16)


@pytest.mark.parametrize(
    ("is_there", "has_bfloat16", "dtype"),
    [(True, True, "bfloat16"), (True, False, "float32"), (False, True, "float32")],
)
def test_bfloat16_is_chosen_on_a_gpu_that_has_it(
    is_there: bool, has_bfloat16: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_gpu(monkeypatch, is_there=is_there, has_bfloat16=has_bfloat16)
    assert fast_dtype()[0] == dtype


def test_bfloat16_is_chosen_on_a_processor_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, is_there=False, has_bfloat16=False)
    monkeypatch.setattr(configs, "has_bfloat16", lambda: True)
    assert fast_dtype() == ("bfloat16", "the processor has instructions for bfloat16")


def test_auto_is_the_same_dtype_for_server_and_trainer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_gpu(monkeypatch, is_there=True, has_bfloat16=True)
    words = ["model.dtype=auto", "trainer.ppo.engine.fsdp.dtype=auto"]
    config = configs.parse(ExperimentConfig, words, command="train", description="")
    assert config.model.dtype == "bfloat16"
    assert config.trainer.ppo.engine.fsdp.dtype == "bfloat16"
    assert config.trainer.offline.engine.fsdp.dtype == "float32"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "dtype=auto: bfloat16, because the GPU has bfloat16\n"
    server = configs.parse(ServerConfig, words[:1], command="serve", description="")
    assert server.model.dtype == "bfloat16"


def test_auto_among_the_options_of_own_servers_is_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_gpu(monkeypatch, is_there=False, has_bfloat16=False)
    words = ["launcher.server_args=[model.dtype=auto]"]
    config = configs.parse(ExperimentConfig, words, command="train", description="")
    assert configs.own_server(config).model.dtype == "float32"
