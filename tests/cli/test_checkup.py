"""`arealite check`: a run's needs, said before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arealite.cli import checkup
from arealite.cli.main import main
from tests.e2e.conftest import write_rows
from tests.models import tiny_model


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    tiny_model(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", 64, seed=1)
    return [
        "check",
        f"model.path={tmp_path / 'model'}",
        f"dataset.train={tmp_path / 'train.jsonl'}",
        f"cluster.run_root={tmp_path}",
        f"cluster.name_root={tmp_path / 'names'}",
        "trainer.ppo.batch_size=16",
        "trainer.ppo.collector.group_size=4",
        "trainer.ppo.collector.concurrency=8",
        "trainer.ppo.collector.sampling.max_new_tokens=6",
        "trainer.ppo.max_staleness=1",
    ]


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {line[0]: line[1] for line in lines}


def test_a_good_run_is_described(words: list[str], capsys: Any) -> None:
    assert main(words) == 0
    told = said(capsys)
    assert told["model"] == "qwen2, 0.02 M parameters, context 512"
    assert told["data"] == "64 tasks to train, 0 held out"
    assert told["servers"].startswith("none yet; start one: arealite serve-llm experiment_name=")
    assert told["staleness"].startswith("η=1: (η + 1) × batch_size = 32 trajectories")
    assert told["staleness"].endswith("a batch takes 2 rounds: raise concurrency")
    assert "WARNING" not in told
    assert "ok:" in told


@pytest.mark.parametrize(
    ("more", "what", "text"),
    [
        (["trainer.ppo.collector.concurrency=64"], "staleness", "32 stay empty"),
        (["trainer.ppo.publisher.type=shared"], "servers", "the trainer itself"),
        (["launcher.llm_servers=2"], "servers", "started with the run"),
    ],
)
def test_what_depends_on_settings(
    words: list[str], capsys: Any, more: list[str], what: str, text: str
):
    assert main([*words, *more]) == 0
    assert text in said(capsys)[what]


def test_memory_counts_what_each_role_holds() -> None:
    """Against sums by hand: 16 bytes a trained parameter in float32, 2 a frozen one in bfloat16."""
    from arealite.api.algorithm import KLConfig
    from arealite.api.config import ExperimentConfig
    from arealite.api.engine_config import FSDPConfig, TrainEngineConfig
    from arealite.api.trainer import PPOConfig, TrainerConfig

    model = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 10}
    numel = 10**9

    def held(dtype: Any = "float32", **ppo: Any) -> float:
        fsdp = FSDPConfig(dtype=dtype, max_tokens_per_microbatch=1, logits_chunk=1)
        engine = TrainEngineConfig(fsdp=fsdp)
        config = ExperimentConfig(trainer=TrainerConfig(ppo=PPOConfig(engine=engine, **ppo)))
        return dict(checkup.memory(config, model, {"weight": [numel]}))["trainer, each of 1"]

    assert held() == pytest.approx(16 * numel, rel=1e-3)
    assert held("bfloat16") == pytest.approx(18 * numel, rel=1e-3)
    assert held("bfloat16", kl=KLConfig(coef=0.1)) == pytest.approx(20 * numel, rel=1e-3)


def test_too_little_memory_is_a_warning(words: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkup.os, "sysconf", lambda name: 1)
    monkeypatch.setattr(checkup, "_gpu_memory", lambda: 0)
    assert main(words) == 0
    assert "this host has free 1 byte" in said(capsys)["WARNING"]


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        (["model.path=/nowhere"], "is no Hugging Face model folder"),
        (["launcher.llm_servers=1", "launcher.server_args=[llm_server.nope=1]"], "unknown key"),
        (["trainer.ppo.publisher.type=shared", "launcher.trainer_ranks=2"], "trainer_ranks=1"),
        (
            ["trainer.ppo.publisher.type=shared", "launcher.llm_servers=1"],
            "updates no other server",
        ),
        (
            ["trainer.ppo.publisher.type=shared", "trainer.ppo.engine.fsdp.dtype=bfloat16"],
            "use engine.fsdp.dtype=float32",
        ),
    ],
)
def test_what_would_not_start_is_one_line(words: list[str], capsys: Any, more: list[str], fix: str):
    assert main([*words, *more]) == 2
    error = capsys.readouterr().err
    assert fix in error
    assert len(error.splitlines()) == 1


def test_a_config_may_stand_without_its_option(
    words: list[str], tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {ppo: {max_staleness: 3}}\n")
    assert main(["check", str(file), *words[1:-1]]) == 0
    assert said(capsys)["staleness"].startswith("η=3: ")
