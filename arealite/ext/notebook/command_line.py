"""A command of AReaLite as a child process of a script or a notebook."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from omegaconf import OmegaConf

from arealite.api.agent import agents
from arealite.api.env import envs
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base import config_tree, exit_record
from arealite.base.config import Layer, dotlist, read_layers
from arealite.base.errors import ArealiteError, RoleError, UserError
from arealite.base.exit_record import ERROR
from arealite.cli import configs, options
from arealite.cli.preflight import is_self_served
from arealite.ext.diagnosis.exit_reason import exit_reason
from arealite.ext.hub.hub_model import hub_folder
from arealite.ext.notebook.objects import data_path, encode, registered, reward_options
from arealite.impl.launcher.processes import GUARD, how_ended
from arealite.system.data.tasks import reward_of
from arealite.system.names.name_registry import NameRegistry

T = TypeVar("T")
C = TypeVar("C", bound=ExperimentConfig)
PartOptions = Mapping[str, Any]
Overrides = Mapping[str, object] | Sequence[str] | None
ConfigFiles = str | Path | Sequence[str | Path]
NESTED = "AREALITE_NESTED"
"""Environment variable of the processes that this API starts."""
CHECKER = "arealite-check"
"""Name of the checking thread."""
COLLECTOR = "trainer.ppo.collector"
SERVERS = "launcher.llm_servers"
GUARDED = GUARD.replace("kill -9 0", "kill -TERM 0")
"""Shell script: when this process exits, the command gets SIGTERM and writes its checkpoint."""
POLL_S = 0.2
_running = set["RunningCommand"]()
"""Keeps running commands: the end of an object closes its pipe, which stops its command."""


def checked(check: Callable[[], T]) -> T:
    """Return the result of a check, made in a thread: notebooks run an event loop in theirs.

    Raises:
        UserError: A process of a run, or the check itself, imports the calling script.
    """
    if NESTED in os.environ or threading.current_thread().name.startswith(CHECKER):
        raise UserError(
            "a process of a run imports this script, which would start another run. "
            "Move the calls of arealite.train and others below "
            '`if __name__ == "__main__":`.'
        )
    with ThreadPoolExecutor(1, CHECKER) as thread:
        return thread.submit(check).result()


def words(overrides: Overrides, **options: object) -> list[str]:
    """Return overrides, and the options that are not None, as words of the command line."""
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r}: use a dict, as in {{'trainer.ppo.lr': 1e-6}}.")
    written = list[str]()
    values = {key: value for key, value in options.items() if value is not None}
    if isinstance(overrides, Mapping):
        values |= overrides
    elif overrides is not None:
        written += overrides
    return [*written, *(f"{key}={encode(value).decode()}" for key, value in values.items())]


def resolve(
    schema: type[C],
    config: ConfigFiles,
    user_words: Sequence[str],
    data: PartOptions,
    parts: PartOptions,
) -> C:
    """Return the config of a command.

    If the run needs a server, and there is none, it starts one, unless the options say how many.

    Args:
        schema: The command's root config class.
        config: Preset or file, or several.
        user_words: Words of the user.
        data: Rows by option; None: not given.
        parts: `model`, `reward`, `env` and `agent`; None: not given.

    Raises:
        UserError: An argument is wrong.
    """
    names = [config] if isinstance(config, str | Path) else config
    files = [options.find_config(str(name)) for name in names]
    given_parts = {name: part for name, part in parts.items() if part is not None}
    layers = read_layers(files, user_words)
    arguments = dotlist(part_words(given_parts, imports=configs.imports_of(layers)))
    run = configs.merge(schema, [*layers, Layer("arguments", arguments)])
    _check_parts(run, given_parts)
    folder = run_paths(run).root.parent
    for option, rows in data.items():
        if rows is not None:
            run = _replaced(run, option, data_path(rows, folder, option))
    if "reward" in given_parts:
        run = _with_reward(run, given_parts["reward"])
    has_number = any(OmegaConf.select(layer.options, SERVERS) is not None for layer in layers)
    return _replaced(run, SERVERS, 1) if not has_number and _needs_server(run) else run


def _replaced(config: C, key: str, value: object) -> C:
    """Return a config with another value of the option `key`."""
    name, _, inner_key = key.partition(".")
    if inner_key:
        value = _replaced(getattr(config, name), inner_key, value)
    return replace(config, **{name: value})


def _needs_server(config: ExperimentConfig) -> bool:
    """Return whether the run generates, and there is no server for it."""
    if config.trainer.is_offline or is_self_served(config):
        return False
    if config.llm_server.addresses:
        return False
    return not NameRegistry.of(config).list("llm_server")


def part_words(parts: PartOptions, *, imports: Sequence[str]) -> list[str]:
    """Return the words of `model`, `env`, `agent`, and of the `imports` that they need.

    Args:
        parts: The parts.
        imports: The option `imports` without them.

    Raises:
        UserError: No other process can import a part.
    """
    options = dict[str, object]()
    all_imports = [*imports]
    if "model" in parts:
        model_path = str(parts["model"])
        options["model.path"] = str(hub_folder(model_path) or model_path)
    for name, table in (("env", envs), ("agent", agents)):
        part = parts.get(name)
        if isinstance(part, str):  # a module of `imports` may register it
            options[f"{COLLECTOR}.{name}.type"] = part
        elif part is not None:
            part_type, modules = registered(part, table)
            options[f"{COLLECTOR}.{name}.type"] = part_type
            all_imports += [module for module in modules if module not in all_imports]
    return words(options, imports=all_imports if len(all_imports) > len(imports) else None)


def _with_reward(config: C, reward: Any) -> C:
    """Return a config with another reward; other options of rewards stay.

    Raises:
        UserError: The environment computes its own, or no other process can import a function.
    """
    env = config.trainer.ppo.collector.env
    env_type = env.type
    reward_config = reward_of(env)
    if reward_config is None:
        raise UserError(f"reward: environment {env_type} computes its own. Remove the argument.")
    tree = config_tree.plain(reward_config)
    for name, value in msgspec.json.decode(encode(reward_options(reward))).items():
        tree[name] = tree[name] | value if isinstance(value, dict) else value
    options_name = env_type if env_type in envs.configs else envs.base_of(env_type)
    new_reward = config_tree.build(type(reward_config), tree)
    changed = _replaced(config, f"{COLLECTOR}.env.{options_name}.reward", new_reward)
    config_tree.check_ranges(changed)
    return changed


def _check_parts(config: ExperimentConfig, parts: PartOptions) -> None:
    """Check that the run has the environment that `env`, `agent` and `reward` are for.

    Raises:
        UserError: An offline trainer has no environment, and collector.envs has several; or a name
            is unknown.
    """
    collector = config.trainer.ppo.collector
    env_parts = sorted(parts.keys() - {"model"})
    if not env_parts:
        return
    if collector.envs:
        raise UserError(
            f"{env_parts[0]}: the run has several environments: "
            f"set {COLLECTOR}.envs.NAME in overrides."
        )
    if config.trainer.is_offline:
        raise UserError(
            f"{env_parts[0]}: the run has no environment, "
            f"because trainer.type={config.trainer.type}: remove it."
        )
    envs.check(collector.env.type)
    agents.check(collector.agent.type)


class RunningCommand:
    """A running command. Its output is in the file `log`."""

    def __init__(self, argv: Sequence[str], log: Path, *, config: object = None) -> None:
        """Start a command.

        Args:
            argv: Its words.
            log: File of its output.
            config: Its resolved config, for a file beside the log; None: the words name it.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "arealite.cli.main", *argv]
        if config is not None:
            file = log.with_suffix(config_tree.SUFFIX)
            config_tree.write(config, file)
            command.append(str(file))
        environment = {
            **os.environ,
            NESTED: "1",
            "PYTHONPATH": os.pathsep.join(own_folders()),
            "FORCE_COLOR": "",  # a notebook sets it
            exit_record.VARIABLE: str(exit_record.new_file(log)),
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", GUARDED, "sh", *command],
                stdin=subprocess.PIPE,  # closes when this process ends, whatever the reason
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only this process
            )
        self.log = log
        _running.add(self)

    @property
    def code(self) -> int | None:
        """The exit code; None while the command runs."""
        code = self.process.poll()
        if code is not None and self.process.stdin:
            self.process.stdin.close()
            _running.discard(self)
        return code

    def wait(self) -> int:
        """Print the output until the command ends; return its exit code.

        An interrupt (Ctrl-C, or the stop button of a notebook) is sent on to the command, and is
        raised when the command has ended.
        """
        interrupt: KeyboardInterrupt | None = None
        code = None
        with self.log.open(encoding="utf-8", errors="replace") as output:
            while code is None:
                try:
                    with suppress(subprocess.TimeoutExpired):
                        self.process.wait(POLL_S)
                    code = self.code
                    with suppress(OSError):  # a closed output does not end the run
                        print(output.read(), end="", flush=True)
                except KeyboardInterrupt as error:
                    interrupt = error
                    self.process.send_signal(signal.SIGINT)
        if interrupt:
            raise interrupt
        return code

    def stop(self, number: int) -> None:
        """Send a signal, and return when the command has ended."""
        self.process.send_signal(number)
        self.process.wait()
        _ = self.code

    def wait_for_line(self, begin: str) -> str:
        """Return the rest of the first line of the output that begins with `begin`.

        Raises:
            ArealiteError: The command has ended.
        """
        line = re.compile(f"^{re.escape(begin)}(.*)\n", re.M)
        while True:
            match = line.search(self.log.read_text("utf-8", "replace"))
            if match:
                return match[1]
            if self.code is not None:
                raise self.error("the server")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)

    def error(self, subject: str) -> ArealiteError:
        """Return the error of a command that failed: its end, its last error line, its log."""
        code = self.code or 0
        record = exit_record.read(exit_record.path_of(self.log))
        if record is not None:
            reason = record.reason
        else:
            output = self.log.read_text("utf-8", "replace")
            reason = exit_reason(output, code).removeprefix(ERROR)
        error_class = UserError if code == UserError.exit_code else RoleError
        return error_class(f"{subject} failed ({how_ended(code)}): {reason} Log: {self.log}")


def own_folders() -> list[str]:
    """List the folders of `sys.path` that other processes of this Python do not have."""
    installed = (f"{sys.prefix}{os.sep}", f"{sys.base_prefix}{os.sep}")
    return [
        folder
        for folder in sys.path
        if folder and "-packages" not in folder and not folder.startswith(installed)
    ]
