"""Another package adds checks, model formats, servers and runtimes by its entries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from arealite.api.env import EnvConfig, make_env
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.api.runtime import RuntimeConfig, runtimes
from arealite.api.trial import TrialConfig
from arealite.base import entries
from arealite.base.errors import UserError
from arealite.cli import configs, preflight
from arealite.cli.main import main
from arealite.ext.games.reverse import ReverseEnv
from arealite.system.names.name_registry import Entry
from tests.cli.small_run import small_run

Install = Callable[[str, Any], None]


@pytest.fixture
def words(tmp_path: Path, unchanged_model: Path) -> list[str]:
    return [*small_run(tmp_path, unchanged_model), "launcher.llm_servers=1"]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a package with one entry, of a group, named `theirs`."""
    module = ModuleType("of_another_package")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    groups: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(entries, "installed", lambda group: groups.get(group, {}))

    def add(group: str, target: Any) -> None:
        setattr(module, group, target)
        groups[group] = {"theirs": f"{module.__name__}:{group}"}

    return add


@pytest.mark.parametrize("command", [["check"], ["train", "--dry-run"]])
def test_check_of_another_package_warns(
    words: list[str], install: Install, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    def warn(config: ExperimentConfig, facts: RunFacts) -> list[tuple[str, str]]:
        return [("moon", f"{len(facts.train_tasks)} tasks of {facts.model['model_type']}")]

    install("check", warn)
    assert main([*command, *words]) == 0
    assert "moon       warning: 64 tasks of qwen2\n" in capsys.readouterr().out


@pytest.mark.parametrize("group", ["check", "model_check", "module_check"])
def test_check_of_another_package_refuses(
    words: list[str], install: Install, capsys: pytest.CaptureFixture[str], group: str
) -> None:
    def refuse(config: ExperimentConfig, *_: object) -> None:
        raise UserError(f"{config.experiment_name}: full moon. Wait.")

    install(group, refuse)
    assert main(["check", *words]) == 2
    assert capsys.readouterr().err == "error: arealite: full moon. Wait.\n"


def test_model_of_another_format_is_converted(
    words: list[str], install: Install, tmp_path: Path, unchanged_model: Path
) -> None:
    file = tmp_path / "a.moon"

    def convert(path: str) -> Path | None:
        return unchanged_model if path.endswith(".moon") else None

    install("model_format", convert)
    for path in (file, unchanged_model):
        argv = [*words, f"model.path={path}"]
        config = configs.parse(ExperimentConfig, argv, command="a", description="b")
        assert config.model.path == str(unchanged_model)


def test_server_that_another_package_finds_is_not_waited_for(
    words: list[str], install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Entry(role="llm_server", id="moon", value={}, age_s=0.0)
    install("server_finder", lambda config, model: [server])
    config = configs.load(ExperimentConfig, [], [*words, "server_wait_s=0"])
    assert preflight.find_servers(config, {}) == [server]
    assert capsys.readouterr().out == ""


def test_environment_is_created_by_the_runtime_of_another_package(
    words: list[str], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "_table", {**runtimes._table})

    def on_the_moon(args: TrialConfig, config: EnvConfig) -> ReverseEnv:
        return ReverseEnv(args, config.runtime.type)

    install("runtime", on_the_moon)
    config = configs.load(
        ExperimentConfig,
        [],
        [*words, "trainer.ppo.collector.env={type: reverse, runtime: {type: theirs}}"],
    )
    preflight.check_options(config)
    env = make_env(config, config.trainer.ppo.collector.env)
    assert env.config == "theirs"
    with pytest.raises(UserError, match=r"runtime type 'their'\. Did you mean 'theirs'\?"):
        make_env(config, EnvConfig(runtime=RuntimeConfig(type="their")))
