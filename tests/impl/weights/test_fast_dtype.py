"""The dtype that `auto` chooses, and the configs that have it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from arealite.api.config import ExperimentConfig, ServerConfig
from arealite.cli import configs
from arealite.impl.weights import fast_dtype
from arealite.impl.weights.fast_dtype import WORTH


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    fast_dtype.fast_dtype.cache_clear()
    yield
    fast_dtype.fast_dtype.cache_clear()


def set_speed(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """Let bfloat16 have `ratio` times the speed of float32 on a CPU."""
    seconds = {torch.float32: 1.0, torch.bfloat16: 1.0 / ratio}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fast_dtype, "_seconds", lambda dtype: seconds[dtype])


@pytest.mark.parametrize(
    ("ratio", "dtype"),
    [(0.01, "float32"), (WORTH - 0.01, "float32"), (WORTH + 0.01, "bfloat16"), (8.0, "bfloat16")],
)
def test_bfloat16_is_chosen_where_it_is_clearly_faster(
    ratio: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_speed(monkeypatch, ratio)
    assert fast_dtype.fast_dtype()[0] == dtype


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_cuda_devices_with_bfloat16_use_it(
    has_bfloat16: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: has_bfloat16)
    assert fast_dtype.fast_dtype()[0] == dtype


def test_products_are_timed() -> None:
    assert 0.0 < fast_dtype._seconds(torch.float32) < 60.0


def test_auto_is_the_same_dtype_for_server_and_trainer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_speed(monkeypatch, 4.0)
    words = ["model.dtype=auto", "trainer.ppo.engine.fsdp.dtype=auto"]
    config = configs.parse(ExperimentConfig, words, command="train", description="")
    assert config.model.dtype == "bfloat16"
    assert config.trainer.ppo.engine.fsdp.dtype == "bfloat16"
    assert config.trainer.offline.engine.fsdp.dtype == "float32"
    assert "dtype auto: bfloat16 (in bfloat16, matrix products have 4 times" in (
        capsys.readouterr().out
    )
    server = configs.parse(ServerConfig, words[:1], command="serve", description="")
    assert server.model.dtype == "bfloat16"
