"""Checks of a run before it starts, and messages during the search for a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from arealite.api.agent import agents
from arealite.api.experiment_config import DatasetConfig, ExperimentConfig, ModelConfig
from arealite.api.task import Task
from arealite.api.trial import ClusterConfig
from arealite.base.errors import UserError
from arealite.base.model_folder import model_difference
from arealite.cli import main, preflight
from arealite.cli.configs import load
from arealite.ext.prompts import prompt_checks
from arealite.system.names.name_registry import NameRegistry
from tests.models import tiny_tokenizer

QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 320}
NESTED = {"architectures": ["X"], "model_type": "x", "text_config": {"vocab_size": 9}}


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        (QWEN, QWEN, None),
        (QWEN | {"vocab_size": 64}, QWEN, "its vocab_size is 64, model.path has 320"),
        (QWEN | {"model_type": "llama"}, QWEN, "its model_type is llama"),
        # A server reports the vocabulary of its text part; a missing value is accepted.
        ({"vocab_size": 9, "model_type": "x", "architectures": ["X"]}, NESTED, None),
        ({"vocab_size": 8, "model_type": "x", "architectures": ["X"]}, NESTED, "vocab_size is 8"),
        ({"architectures": [], "model_type": None}, QWEN, None),
        ({"tie_word_embeddings": False}, QWEN | {"tie_word_embeddings": True}, "is False"),
    ],
)
def test_model_difference_compares_the_known_fields(
    theirs: dict[str, Any], ours: dict[str, Any], says: str | None
) -> None:
    said = model_difference(theirs, ours)
    assert said is None if says is None else says in str(said)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("launcher.max_restarts", -1),
        ("launcher.silent_s", 0),
        ("trainer.ppo.checkpoint.every_steps", -5),
        ("trainer.ppo.checkpoint.keep", 0),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, key: str, value: int) -> None:
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UserError, match=rf"{key}={value}"):
        load(ExperimentConfig, tmp_path / "empty.yaml", [f"{key}={value}"])


def test_synchronous_trainer_with_max_staleness_is_refused() -> None:
    stale, fresh = ["trainer.ppo.max_staleness=3"], ["trainer.ppo.max_staleness=0"]
    with pytest.raises(UserError, match=r"is synchronous, but max_staleness is 3"):
        preflight.check_options(load(ExperimentConfig, [], ["trainer.type=ppo", *stale]))
    preflight.check_options(load(ExperimentConfig, [], ["trainer.type=async_ppo", *stale]))
    preflight.check_options(load(ExperimentConfig, [], ["trainer.type=ppo", *fresh]))


def test_tokenizer_is_loaded_only_if_a_prompt_may_be_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(ExperimentConfig(), model=ModelConfig(path=str(tmp_path)))
    short, long = (
        Task(task_id=f"t{size}", prompt="x" * size, ground_truth=None, extra_info={})
        for size in (100, 700)
    )

    class Loaded(Exception):
        pass

    def load_tokenizer(path: str) -> None:
        raise Loaded(path)

    monkeypatch.setattr(prompt_checks, "load_tokenizer", load_tokenizer)
    with pytest.raises(UserError, match="has no tokenizer"):
        prompt_checks.check_prompts(config, [short], [1024])
    tiny_tokenizer().save_pretrained(tmp_path)
    prompt_checks.check_prompts(config, [short], [1024])
    with pytest.raises(Loaded):
        prompt_checks.check_prompts(config, [short, long], [1024])


@pytest.mark.parametrize("held_out", [None, "eval.jsonl"])
def test_held_out_budget_is_checked_if_there_are_held_out_rows(held_out: str | None) -> None:
    config = replace(ExperimentConfig(), dataset=DatasetConfig(eval=held_out))
    ppo = config.trainer.ppo
    sampling = replace(ppo.collector.sampling, max_new_tokens=8)
    small = replace(ppo, collector=replace(ppo.collector, sampling=sampling))
    config = replace(config, trainer=replace(config.trainer, ppo=small))
    refused = pytest.raises(UserError, match=r"256 leaves no room.*trainer\.ppo\.eval\.sampling")
    with refused if held_out else pytest.raises(UserError, match="has no tokenizer"):
        prompt_checks.check_prompts(config, [], [64])


def test_wait_for_a_server_is_announced_only_if_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ClusterConfig(name_root=str(tmp_path), ttl_s=600.0)
    config = ExperimentConfig(cluster=cluster, server_wait_s=0.2)
    with pytest.raises(UserError, match="Start one"):
        preflight.find_servers(config, {})
    assert "waiting up to 0.2 s for a language-model server" in capsys.readouterr().out
    NameRegistry.of(config).put("llm_server", "a", {"address": "http://a"})
    patient = replace(config, server_wait_s=120.0)
    assert [entry.id for entry in preflight.find_servers(patient, {})] == ["a"]
    assert capsys.readouterr().out == ""


def test_why_needs_no_imported_module_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from arealite.base import config as base_config

    cluster = ClusterConfig(name_root=str(tmp_path))
    config = replace(ExperimentConfig(cluster=cluster), imports=["module_of_another_folder"])
    base_config.save(config, tmp_path / "config.yaml")
    assert main.main(["why", str(tmp_path)]) == 0
    assert "is not running" in capsys.readouterr().out


@pytest.mark.parametrize("base", ["chat", "tool_use", "math_code_single_step"])
def test_custom_agent_options_must_have_the_fields_of_the_base_class(base: str) -> None:
    class Own(agents.get(base)):  # type: ignore[misc]
        pass

    @dataclass(frozen=True, kw_only=True)
    class OwnConfig:
        hint: str = "think"

    agents.register("own", config=OwnConfig)(Own)
    try:
        with pytest.raises(UserError, match=rf"'own': its config OwnConfig .* {base} reads"):
            load(ExperimentConfig, [], [])
    finally:
        agents._table.pop("own"), agents.configs.pop("own")
