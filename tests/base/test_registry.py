"""Registries: lazy built-in entries, plugins, and suggestions for misspelt names."""

from __future__ import annotations

import functools
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from arealite.api.agent import agents
from arealite.api.algorithm import TokenAdvantage, advantages, objectives
from arealite.api.engine import engines
from arealite.api.env import envs
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.launcher import launchers
from arealite.api.llm import clients
from arealite.api.llm_server import servers
from arealite.api.logger import loggers
from arealite.api.publisher import publishers
from arealite.api.reward import rewards
from arealite.api.trainer import trainers
from arealite.base import entries, registry
from arealite.base.config_tree import check_constraints
from arealite.base.errors import UserError
from arealite.base.registry import Registry, import_plugins, import_user_module
from arealite.cli import configs

TABLES = [agents, clients, engines, envs, launchers, loggers, publishers, rewards, servers]
TABLES += [trainers]


def test_built_in_part_is_imported_on_first_use():
    table: Registry[object] = Registry("thing", path="pathlib:Path")
    assert table.names() == ["path"]
    assert table.get("path") is Path


def test_unknown_name_suggests_the_closest_one():
    table: Registry[object] = Registry("agent", math="x:Y", chat="x:Z")
    with pytest.raises(UserError, match=r"Unknown agent type 'maths'\. Did you mean 'math'\?"):
        table.get("maths")
    with pytest.raises(
        UserError, match=r"Known: chat, math\. If it is your own, add imports=\[MODULE\]"
    ):
        table.get("sorting")


def test_unknown_name_with_imports_says_that_none_registers_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "imported", ["mine.py"])
    table: Registry[object] = Registry("reward", math="x:Y")
    with pytest.raises(UserError, match=r"No module of imports=\[mine\.py\] registers it\.$"):
        table.check("close")


def test_module_with_the_name_of_an_unknown_part_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text('@agents.register("my_agent", config=MyAgentConfig)')
    hint = re.escape("add imports=[my_agent].")
    with pytest.raises(UserError, match=rf"Unknown agent type 'my_agent'\..* {hint}"):
        agents.check("my_agent")
    key = "trainer.ppo.collector.agent.my_agent.my_param=hello"
    with pytest.raises(UserError, match=rf"unknown key .*my_agent'\..* {hint}"):
        configs.load(ExperimentConfig, [], [key])


@pytest.mark.parametrize(
    "key",
    [
        "trainer.ppo.collector.env.sudoku.size=3",
        "trainer.ppo.collector.envs.a.env.sudoku.size=3",
        "trainer.ppo.loss.sudoku.size=3",
    ],
)
def test_options_of_a_part_of_no_installed_package_say_how_to_find_it(key: str) -> None:
    hint = "If sudoku is a part of another package, install the package, .* `arealite info` lists"
    with pytest.raises(UserError, match=rf"unknown key .*sudoku'\..* {hint} all installed parts\."):
        configs.load(ExperimentConfig, [], [key])


@pytest.mark.parametrize("key", ["launcher.rollout_worker=2", "trainer.ppo.clip=1", "modle=x"])
def test_misspelt_option_is_no_part_of_another_package(key: str) -> None:
    with pytest.raises(UserError, match="unknown key") as refused:
        configs.load(ExperimentConfig, [], [key])
    assert "another package" not in str(refused.value)


def test_function_is_registered_like_a_class():
    table: Registry[object] = Registry("policy_objective", floor="math:floor")

    @table.register("plain")
    def plain() -> None: ...

    assert (table.get("plain"), table.get("floor")) == (plain, math.floor)
    assert (table.name_of(plain), table.base_of("plain")) == ("plain", "plain")
    with pytest.raises(UserError, match=r"'plain' is already registered; .* name for ceil"):
        table.register("plain")(math.ceil)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("loss.objective=pppo", "Unknown policy_objective type 'pppo'. Did you mean 'ppo'? Known"),
        ("advantage.type=gro", "Unknown advantage type 'gro'. Did you mean 'grpo'? Known"),
    ],
)
def test_unknown_objective_or_advantage_is_refused_before_a_run(option: str, says: str) -> None:
    config = configs.load(ExperimentConfig, [], [f"trainer.ppo.{option}"])
    with pytest.raises(UserError, match=re.escape(says)):
        configs.check_names(config)


def test_objective_and_advantage_of_a_users_file_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_formulas.py"
    file.write_text(
        "from arealite.api.algorithm import TokenAdvantage, advantages, objectives\n"
        "@objectives.register('own_objective')\n"
        "def objective(config, ratio_N, logprobs_N, advantages_N):\n"
        "    return -ratio_N * advantages_N\n"
        "@advantages.register('own_relative')\n"
        "def relative(config, rewards):\n"
        "    return [reward - max(rewards) for reward in rewards]\n"
        "def formula(config, rewards_N, values_N, bootstrap):\n"
        "    return rewards_N - values_N\n"
        "advantages.register('own_critic')(TokenAdvantage(formula=formula, has_critic=True))\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    for table in (objectives, advantages):
        monkeypatch.setattr(table, "_table", {**table._table})
    words = [f"imports=[{file}]", "trainer.ppo.loss.objective=own_objective"]
    kinds = {"own_relative": (True, False), "own_critic": (False, True)}
    for name, (is_relative, has_critic) in kinds.items():
        type_option = f"trainer.ppo.advantage.type={name}"
        config = configs.load(ExperimentConfig, [], [*words, type_option])
        configs.check_names(config)
        advantage = config.trainer.ppo.advantage
        assert (advantage.is_relative, advantage.has_critic) == (is_relative, has_critic)
    loss = replace(config.trainer.ppo.loss, dual_clip=2.0, decoupled=False, ratio="sequence")
    check_constraints(loss, "trainer.ppo.loss.")  # those that name built-in objectives do not apply


def test_registering_a_taken_name_is_refused():
    table: Registry[object] = Registry("agent")

    @table.register("mine", config=int)
    class Mine:
        pass

    assert table.get("mine") is Mine
    assert table.configs == {"mine": int}
    with pytest.raises(UserError, match="already registered"):
        table.register("mine")(type("Other", (), {}))


def test_method_that_must_be_a_coroutine_is_checked_when_it_is_registered():
    class Played:
        async def run(self) -> int:
            return 1

        def name(self) -> str:
            return ""

    def counted(method):
        @functools.wraps(method)
        def call(self):
            return method(self)

        return call

    table: Registry[object] = Registry("env")
    with pytest.raises(UserError, match=r"Bad\.run must be a coroutine: write `async def run"):

        @table.register("bad")
        class Bad(Played):
            def run(self) -> int:
                return 2

    assert table.names() == []

    @table.register("good")
    class Good(Played):
        @counted
        async def run(self) -> int:
            return 3

        def name(self) -> str:
            return "good"

    assert table.get("good") is Good


def test_environment_without_async_is_one_line_before_a_run(tmp_path: Path):
    file = tmp_path / "plain_env.py"
    file.write_text(
        "from arealite.api.env import Env, envs\n"
        "@envs.register('plain_env')\n"
        "class PlainEnv(Env):\n"
        "    def run(self, task, agent):\n"
        "        agent.reward(1.0)\n"
    )
    with pytest.raises(UserError, match=r"^PlainEnv\.run must be a coroutine"):
        import_plugins([str(file)])


def test_every_built_in_entry_is_a_class():
    for table in TABLES:
        for name in table.names():
            assert isinstance(table.get(name), type), (table.kind, name)


def test_every_built_in_formula_can_be_imported():
    assert all(callable(objectives.get(name)) for name in entries.own("policy_objective"))
    for name in entries.own("advantage"):
        function = advantages.get(name)
        assert isinstance(function, TokenAdvantage) == (name in ("reinforce", "gae"))
        assert isinstance(function, TokenAdvantage) or callable(function)


def test_plugins_are_imported_and_missing_ones_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_plugin_module.py").write_text("LOADED = True")
    monkeypatch.syspath_prepend(tmp_path)
    import_plugins(["my_plugin_module"])
    (tmp_path / "my_faulty_module.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"my_faulty_module.*ZeroDivisionError"):
        import_plugins(["my_faulty_module"])
    assert sys.modules.pop("my_plugin_module").LOADED
    with pytest.raises(UserError, match=r"imports=\[nowhere_to_be_found\]"):
        import_plugins(["nowhere_to_be_found"])


def test_plugin_file_is_imported_with_modules_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/beside_my_part.py").write_text("HERE = 1")
    (tmp_path / "parts/my_part_in_a_file.py").write_text("from beside_my_part import HERE")
    import_plugins(["parts/my_part_in_a_file.py"])
    assert sys.modules.pop("my_part_in_a_file").HERE == sys.modules.pop("beside_my_part").HERE
    with pytest.raises(UserError, match=r"imports=\[parts/no_part\.py\]: no module of that name"):
        import_plugins(["parts/no_part.py"])


def test_part_without_options_inherits_those_of_its_base_class():
    table: Registry[object] = Registry("agent", fraction="fractions:Fraction")
    table.register("mine")(type("Mine", (table.get("fraction"),), {}))
    table.register("other")(type("Other", (), {}))
    config = SimpleNamespace(type="mine", fraction="options of fraction")
    assert table.options(config) == "options of fraction"
    assert table.options(SimpleNamespace(type="fraction", fraction=1)) == 1
    assert table.options(SimpleNamespace(type="other", fraction=1)) is None
    assert table.options(SimpleNamespace(type="mine", mine=2, fraction=1)) == 2


def test_module_that_is_being_imported_is_refused_in_place_of_a_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_itself.py").write_text(
        "from threading import Thread\n"
        "from arealite.base.registry import import_user_module\n"
        "found = []\n"
        "def check():\n"
        "    try:\n"
        "        import_user_module(__name__, 'imports')\n"
        "    except Exception as error:\n"
        "        found.append(str(error))\n"
        "thread = Thread(target=check, daemon=True)\n"
        "thread.start()\n"
        "thread.join(20)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (why,) = import_user_module("imports_itself", "imports").found
    assert "still being imported" in why
