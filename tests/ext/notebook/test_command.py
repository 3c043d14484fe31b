"""Arguments become words of the command line; a command ends, fails and stops with its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import arealite
from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import RoleError, UserError
from arealite.cli import configs
from arealite.ext.notebook import command_line
from arealite.ext.notebook.command_line import NESTED, RunningCommand, checked, resolve, words
from tests.ext.notebook import things
from tests.fakes.loads import counted_loads
from tests.waiting import until_exited

ROOT = Path(__file__).resolve().parents[3]
AT = "trainer.ppo.collector"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(
    config: Any = "async_ppo",
    overrides: Any = None,
    data: Mapping[str, Any] | None = None,
    **parts: Any,
) -> ExperimentConfig:
    """Resolve a command whose names are in the folder of the test."""
    own = [*words(overrides), "cluster.name_root=names"]
    return resolve(ExperimentConfig, config, own, data or {}, parts)


# ---------------------------------------------------------------- words


def test_override_keeps_its_type_on_the_command_line() -> None:
    given = {
        "trainer.ppo.lr": 1e-6,
        "dataset.eval": None,
        "model.path": Path("a: b"),
        "dataset.shuffle": False,
        "imports": [],
        "trainer": {"ppo": {"total_steps": 5}},
    }
    found = configs.load(ExperimentConfig, [], words(given))
    assert found.trainer.ppo.lr == 1e-6
    assert (found.dataset.eval, found.dataset.shuffle, found.imports) == (None, False, [])
    assert found.model.path == "a: b"
    assert found.trainer.ppo.total_steps == 5
    assert words(["trainer.ppo.lr=1"]) == ["trainer.ppo.lr=1"], "as on the command line"


def test_overrides_as_one_text_are_refused() -> None:
    with pytest.raises(UserError, match="use a dict"):
        words("trainer.ppo.lr=1")


def test_arguments_become_options(folder: Path) -> None:
    config = made(
        overrides={"trial_name": "mine"},
        data={"dataset.train": things.ROWS, "dataset.eval": None},
        model="m",
        env=things.Letters,
        agent="chat",
    )
    collector = config.trainer.ppo.collector
    assert (collector.env.type, collector.agent.type) == ("python_letters", "chat")
    assert (config.model.path, config.imports) == ("m", ["tests.ext.notebook.things"])
    assert Path(config.dataset.train).parent == folder / "runs" / "arealite"
    assert config.dataset.eval is None
    assert config.launcher.llm_servers == 1, "the run starts its server"
    preset = configs.load(ExperimentConfig, configs.CONFIG_DIR / "async_ppo.yaml", [])
    assert config.trainer.ppo.total_steps == preset.trainer.ppo.total_steps


def test_arguments_are_checked_in_one_load(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted_loads(monkeypatch)
    made(
        data={"dataset.train": things.ROWS},
        model="m",
        env="math",
        agent="chat",
        reward=things.length,
    )
    assert counts == {"async_ppo.yaml": 1, "ExperimentConfig": 1}


def test_command_gets_the_resolved_config_as_a_file(folder: Path) -> None:
    config = made(overrides={"seed": 7}, env=things.Letters)
    command = RunningCommand(["check"], folder / "log", config=config)
    word = command.process.args[-1]  # type: ignore[index]
    assert configs.load(ExperimentConfig, Path(word), []) == config
    command.wait()


def test_imports_of_the_user_are_kept() -> None:
    config = made(overrides={"imports": ["json"]}, env=things.Letters)
    assert config.imports == ["json", "tests.ext.notebook.things"]


def test_later_config_wins(folder: Path) -> None:
    (folder / "own.yaml").write_text("trainer: {ppo: {max_staleness: 7}}")
    config = made(["async_ppo", "algo/gspo", Path("own.yaml")])
    assert config.trainer.ppo.max_staleness == 7
    assert config.trainer.ppo.loss.ratio == "sequence", "of gspo"


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("async_ppo", {"launcher.llm_servers": 2}),
        ("async_ppo", {"launcher.llm_servers": 0}),
        ("async_ppo", {"launcher": {"llm_servers": 0}}),
        ("async_ppo", {"llm_server.addresses": ["127.0.0.1:1"]}),
        ("async_ppo", {"trainer.ppo.publisher.type": "shared"}),
        ("sft", {}),
    ],
)
def test_run_starts_no_server_if_it_has_one_needs_none_or_says_0(
    config: str, overrides: Any
) -> None:
    num_servers = (overrides or {}).get("launcher.llm_servers", 0)
    assert made(config, overrides).launcher.llm_servers == num_servers


def test_reward_becomes_options_of_its_environment() -> None:
    assert made(reward="exact_match").trainer.ppo.collector.env.math.reward.type == "exact_match"
    tools = made(env="tools", reward="exact_match").trainer.ppo.collector.env.tools
    assert tools.reward.type == "exact_match"


def test_reward_keeps_the_other_options_of_rewards() -> None:
    own = {f"{AT}.env.math.reward.function.timeout_s": 7}
    reward = made(overrides=own, reward={things.length: 2}).trainer.ppo.collector.env.math.reward
    assert (reward.type, reward.function.timeout_s, reward.function.weights) == ("function", 7, [2])
    assert reward.function.paths == ["tests.ext.notebook.things:length"]


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (1e10, r"reward\.function\.weights=\[10000000000\.0\] must be at least"),
        (float("inf"), r"function\.weights\[0\]: Expected `float`, got `null`"),
        ("heavy", r"function\.weights\[0\]: Expected `float`, got `str`"),
    ],
)
def test_wrong_weight_of_a_reward_is_refused(weight: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        made(reward={things.length: weight})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": "sft", "reward": things.length}, "no environment, because trainer.type=sft"),
        ({"config": "dpo", "env": "math"}, "no environment, because trainer.type=dpo"),
        ({"env": things.Letters, "reward": "exact_match"}, "python_letters computes its own"),
        ({"env": "tic_tac_toe", "reward": "exact_match"}, "tic_tac_toe computes its own"),
        (
            {"overrides": {f"{AT}.envs.a.env.type": "math"}, "reward": "exact_match"},
            f"several environments: set {AT}.envs.NAME",
        ),
        ({"overrides": {"trainer.ppo.lrr": 1}}, "Did you mean 'trainer.ppo.lr'"),
        ({"overrides": ["--dry-run"]}, "is not an override"),
        ({"config": "nothing.yaml"}, "does not exist"),
        ({"agent": "chatty"}, "Did you mean 'chat'"),
    ],
)
def test_wrong_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(**arguments)


# ---------------------------------------------------------------- nested calls


def test_call_in_a_process_of_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NESTED, "1")
    with pytest.raises(UserError, match='if __name__ == "__main__"'):
        arealite.train(model="m", dataset=things.ROWS)


def test_call_during_a_check_is_refused() -> None:
    with pytest.raises(UserError, match="imports this script"):
        checked(lambda: checked(lambda: 1))
    assert checked(lambda: 1) == 1, "a later call is not nested"


def test_check_runs_in_a_thread_without_an_event_loop() -> None:
    import asyncio

    async def notebook() -> int:
        async def one() -> int:
            return 1

        return checked(lambda: asyncio.run(one()))

    assert asyncio.run(notebook()) == 1


SCRIPT_WITHOUT_GUARD = """
import arealite

@arealite.envs.register("bare")
class Bare(arealite.StepEnv):
    async def reset(self, task): ...
    async def step(self, state, action): ...

arealite.train(model="m", dataset=[{"prompt": "a"}], env=Bare)
"""


@pytest.mark.processes
def test_script_without_a_guard_is_refused_and_starts_nothing(folder: Path) -> None:
    (folder / "bare.py").write_text(SCRIPT_WITHOUT_GUARD)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "bare.py"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("arealite.base.errors.UserError: a process of a run imports this script")
    assert not [*folder.rglob("*.log")]


# ---------------------------------------------------------------- processes


@pytest.mark.processes
def test_output_of_a_command_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert RunningCommand(["--version"], folder / "new" / "log").wait() == 0
    assert capsys.readouterr().out.strip() == arealite.__version__
    assert not command_line._running


@pytest.mark.processes
def test_output_has_no_colours_in_a_notebook(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernel does
    assert RunningCommand(["envs"], folder / "log").wait() == 0
    shown = capsys.readouterr().out
    assert "tic_tac_toe" in shown and "\x1b" not in shown


@pytest.mark.processes
def test_failed_command_raises_its_last_error_line(folder: Path) -> None:
    failed = RunningCommand(["audit", "nothing"], folder / "log")
    assert failed.wait() == 2
    error = failed.error("run x")
    assert isinstance(error, UserError)
    assert "run x failed (exit code 2): no ledger at" in str(error)
    assert str(folder / "log") in str(error)
    failed.process.returncode = -9
    assert isinstance(failed.error("run x"), RoleError)


def test_folders_of_the_interpreter_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child may start another Python, for example SGLang's."""
    own = ["/home/me/project", "/home/me/lib"]
    standard = ["", sys.prefix + "/lib/x", "/home/me/.local/lib/python3/site-packages"]
    monkeypatch.setattr(sys, "path", [own[0], *standard, own[1]])
    assert command_line.own_folders() == own


SCRIPT = """
import os, signal, sys
from pathlib import Path
from arealite.ext.notebook.command_line import RunningCommand
served = RunningCommand(["serve", "env.type=tic_tac_toe"], Path("log"))
served.wait_for_line("serving on ")
print(served.process.pid, flush=True)
sys.stdin.readline()
if sys.argv[1] == "exits":
    sys.exit()
if sys.argv[1] == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
try:
    served.wait()
except KeyboardInterrupt:
    print("code", served.code, flush=True)
"""


def script(how: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start SCRIPT; return it and its command, when the command has started."""
    caller = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdin and caller.stdout
    served = psutil.Process(int(caller.stdout.readline()))  # the caller waits for a line
    caller.stdin.write("\n")
    caller.stdin.flush()
    return caller, served


@pytest.mark.processes
@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_command_stops_when_its_caller(how: str) -> None:
    caller, served = script(how)
    with caller:
        until_exited(caller.pid, served)


@pytest.mark.processes
def test_interrupt_of_the_caller_stops_the_command_first() -> None:
    caller, served = script("waits")
    with caller:
        assert caller.stdout is not None
        assert caller.stdout.readline().startswith("serving on"), "wait() prints the output"
        caller.send_signal(signal.SIGINT)
        assert caller.stdout.read() == "code 0\n", "the server closed, and then wait() raised"
    until_exited(served)
