"""A missing optional package is refused before any process starts; no test needs the packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.base.extras import check_installed
from arealite.cli import configs
from arealite.cli.main import main
from arealite.cli.preflight import check_training_packages
from tests.cli.small_run import small_run

ENV = "trainer.ppo.collector.env"
MISSING = {
    "peft": [
        ["trainer.ppo.engine.fsdp.lora.rank=4"],
        ["trainer.type=sft", "trainer.offline.engine.fsdp.lora.rank=4"],
        ["model.adapter=some-adapter"],
    ],
    "ray": [["launcher.type=ray"]],
    "textarena": [
        [f"{ENV}.type=textarena"],
        [f"{ENV}.type=textarena", f"{ENV}.runtime.type=subprocess"],
        [
            "trainer.ppo.collector.envs.game.env.type=textarena",
            "trainer.ppo.collector.envs.game.train=generated",
            "dataset.train=''",
        ],
    ],
    "gymnasium": [[f"{ENV}.type=gymnasium", f"{ENV}.gymnasium.env_id=CliffWalking-v1"]],
    "gyllm": [[f"{ENV}.type=gyllm"]],
    "reasoning_gym": [[f"{ENV}.type=reasoning_gym"]],
    "verifiers": [[f"{ENV}.type=verifiers"]],
    "playwright": [[f"{ENV}.type=browser"], [f"{ENV}.type=webarena"]],
    "mcp": [[f"{ENV}.type=tools", f"{ENV}.tools.mcp.docs.command=[docs-server]"]],
    "pydantic_monty": [
        [f"{ENV}.type=tools", f"{ENV}.tools.tools=[python]", f"{ENV}.tools.python.backend=monty"]
    ],
    "sglang": [["launcher.llm_servers=1", "launcher.server_args=[llm_server.type=sglang]"]],
    "vllm": [["launcher.llm_servers=1", "launcher.server_args=[llm_server.type=vllm]"]],
    "wandb": [["logger.types=[wandb]"]],
    "trackio": [["logger.types=[trackio]"]],
}
"""The options that need a module, by module."""
CASES = [(module, options) for module, cases in MISSING.items() for options in cases]


@pytest.fixture
def words(tmp_path: Path, unchanged_model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the options of a small run; refuse to start a process."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr("arealite.impl.launcher.processes.spawn", refuse)
    return [*small_run(tmp_path, unchanged_model), "server_wait_s=0"]


@pytest.mark.parametrize(("module", "options"), CASES, ids=[" ".join(o) for _, o in CASES])
@pytest.mark.parametrize("command", ["train", "check"])
def test_missing_package_of_an_option_is_refused(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    command: str,
    module: str,
    options: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main([command, *words, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{module}" in line and "not installed" in line and "pip install " in line
    if module not in ("wandb", "trackio"):  # the check of the loggers is older
        assert f"needs the package {module}, which is not installed" in line
        keys = [option.partition("=")[0].removesuffix(".docs.command") for option in options]
        assert any(line.startswith(f"error: {key}") for key in keys)


@pytest.mark.parametrize("command", ["collect", "eval"])
def test_sampling_needs_the_packages_of_its_environment_only(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    command: str,
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "textarena", None)
    words = [*words, f"dataset.eval={tmp_path / 'train.jsonl'}", f"out={tmp_path / 'rows.jsonl'}"]
    assert main([command, *words, f"{ENV}.type=textarena"]) == 2
    assert "textarena, which is not installed" in capsys.readouterr().err
    assert main([command, *words, "trainer.ppo.engine.fsdp.lora.rank=4"]) == 2
    assert "no language-model server" in capsys.readouterr().err, "it trains nothing"


@pytest.mark.parametrize("runtime", ["in_process", "subprocess", "docker", "remote"])
def test_package_is_needed_only_where_the_environment_runs(
    monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    words = [f"{ENV}.type=textarena", f"{ENV}.runtime.type={runtime}"]
    config = configs.load(ExperimentConfig, [], words)
    if runtime in ("docker", "remote"):
        check_training_packages(config)
    else:
        with pytest.raises(UserError, match="needs the package textarena"):
            check_training_packages(config)


def test_installed_package_is_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    for module in ("this", "sys"):
        check_installed(module, "x", "an option")
    assert "this" not in sys.modules
    with pytest.raises(UserError, match=r"^a=1 needs the package no_such, .*: pip install x$"):
        check_installed("no_such", "x", "a=1")
