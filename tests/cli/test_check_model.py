"""`arealite check --model` compares the programs that compute a model, without a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arealite.cli import preflight
from arealite.impl.engine import attention
from arealite.impl.engine.fsdp import FSDPEngine
from tests.models import tiny_mixture, tiny_model


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return tiny_mixture(tmp_path / "model", "deepseek_v3")


def test_sound_model_passes_without_a_run(
    mixture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preflight.main(["--model", f"model.path={mixture}"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"compared   plain transformers: mean of a row .*, largest .* nats", told)
    assert "compared   server http://127.0.0.1" in told
    assert "ok: the trainer computes what the others compute" in told


def test_trainer_that_differs_is_a_fault(
    mixture: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(layout: str, model: FSDPEngine, *rest: object) -> str:
        for name, buffer in model.named_buffers():  # type: ignore[attr-defined]
            if name.endswith("inv_freq"):
                buffer *= 0.5
        return real(layout, model, *rest)  # type: ignore[arg-type]

    real = attention.choose
    monkeypatch.setattr(attention, "choose", choose)
    assert preflight.main(["--model", f"model.path={mixture}"]) == 1
    told = capsys.readouterr().out
    assert "Likely reason: rope theta:" in " ".join(told.split())
    assert told.endswith("not ok\n")


def test_server_that_is_not_embedded_is_compared_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model.path={tiny_model(tmp_path / 'model')}"]
    words += ["launcher.server_args=[llm_server.type=sglang]"]
    assert preflight.main(["--model", *words]) == 0
    assert "sglang is compared at the start of each run" in capsys.readouterr().out
