"""On SmolLM2 in bfloat16, a right run passes, and faults are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from arealite.api.engine_config import FSDPConfig, TrainEngineConfig
from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.ext.embedded import cache_decoder
from arealite.ext.embedded.cache_decoder import CacheDecoder, make_decoder
from arealite.ext.embedded.decoder import Decoder
from arealite.ext.embedded.weight_loading import load_model
from arealite.ext.self_check import check
from arealite.impl.trainer.rank_group import World
from tests.ext.embedded.test_cache_decoder import LateDecoder
from tests.ext.self_check.test_faults import swap
from tests.impl.engine.helpers import make_engine
from tests.smollm2 import smollm2

pytestmark = pytest.mark.timeout(600)  # bfloat16 is slow on a CPU without it


def test_trained_weights_pass_and_swapped_tensors_are_named(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained weights are float32 masters, which both programs round."""
    monkeypatch.setattr(check, "LENGTHS", (2, 12))
    monkeypatch.setattr(check, "NEW", 8)
    folder = smollm2()
    engine = make_engine(folder, dtype="bfloat16")
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.0 + 1e-3)
    config = ExperimentConfig(
        cluster=ClusterConfig(name_root=str(tmp_path)),
        model=ModelConfig(path=str(folder), dtype="bfloat16"),
        trainer=TrainerConfig(
            ppo=PPOConfig(engine=TrainEngineConfig(fsdp=FSDPConfig(dtype="bfloat16")))
        ),
    )
    trained = check.SelfCheck(config, engine, World(), 7)
    assert trained.faults() == []
    text = trained.outcomes["plain transformers"]
    assert "3 and 4 times the noise of plain transformers in this dtype" in text
    swap(engine.module)
    (fault,) = check.SelfCheck(config, engine, World(), 0).faults()
    assert "swapped tensors: values of" in fault


def test_embedded_server_takes_the_fast_decoder_and_refuses_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model(str(smollm2()), dtype="bfloat16", device="cpu")[0]
    with capture_logs() as events:
        assert type(make_decoder(model, max_rows=4, seed=0)) is Decoder
        monkeypatch.setattr(cache_decoder, "Decoder", LateDecoder)
        assert type(make_decoder(model, max_rows=4, seed=0)) is CacheDecoder
    assert events[0]["why"] == "the fastest"
    assert "allowed in bfloat16" in events[1]["why"]
