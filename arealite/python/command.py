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

from arealite.api.agent import agents
from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.env import envs
from arealite.base.errors import ArealiteError, RoleError, UserError
from arealite.base.model_folder import local_folder
from arealite.cli import configs, presets
from arealite.cli.preflight import is_self_served
from arealite.impl.launcher.exit_reason import ERROR, exit_reason
from arealite.impl.launcher.processes import GUARD, how_ended
from arealite.python.objects import data_path, encode, registered, reward_options
from arealite.system.data.tasks import reward_of
from arealite.system.names.registry import NameRegistry

T = TypeVar("T")
C = TypeVar("C", bound=ExperimentConfig)
Parts = Mapping[str, Any]
Overrides = Mapping[str, object] | Sequence[str] | None
Config = str | Path | Sequence[str | Path]
NESTED, CHECKER = "AREALITE_NESTED", "arealite-check"
"""Environment variable of the processes that this API starts, and name of the checking thread."""
GUARDED = GUARD.replace("kill -9 0", "kill -TERM 0")
"""Shell script: when this process exits, the command gets SIGTERM and writes its checkpoint."""
POLL_S = 0.2
_running = set["Command"]()
"""Keeps running commands: the end of an object closes its pipe, which stops its command."""


def checked(check: Callable[[], T]) -> T:
    """Return the result of a check, made in a thread: notebooks run an event loop in theirs.

    Raises:
        UserError: A process of a run, or the check itself, imports the calling script.
    """
    if NESTED in os.environ or threading.current_thread().name.startswith(CHECKER):
        what = "a process of a run imports this script, which would start another run"
        fix = 'Move the calls of arealite.train and others below `if __name__ == "__main__":`.'
        raise UserError(f"{what}. {fix}")
    with ThreadPoolExecutor(1, CHECKER) as thread:
        return thread.submit(check).result()


def words(overrides: Overrides, **options: object) -> list[str]:
    """Return overrides, and the options that are not None, as words of the command line."""
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r}: use a dict, as in {{'trainer.ppo.lr': 1e-6}}.")
    given = {key: value for key, value in options.items() if value is not None}
    own = [*overrides] if isinstance(overrides, Sequence) else []
    given |= overrides if isinstance(overrides, Mapping) else {}
    return [*own, *(f"{key}={encode(value).decode()}" for key, value in given.items())]


def resolve(
    schema: type[C], config: Config, own: list[str], data: Parts, parts: Parts
) -> tuple[C, list[str]]:
    """Return the config of a command, and its words.

    Args:
        schema: The command's root config class.
        config: Preset or file, or several.
        own: Words of the user.
        data: Rows by option; None: not given.
        parts: `model`, `reward`, `env` and `agent`; None: not given.

    Raises:
        UserError: An argument is wrong.
    """
    named = [config] if isinstance(config, str | Path) else config
    files = [presets.find(str(each)) for each in named]
    base = configs.load(schema, files, own)
    folder = run_paths(base).root.parent
    own += words({k: data_path(rows, folder, k) for k, rows in data.items() if rows is not None})
    own += part_words(base, {name: part for name, part in parts.items() if part is not None})
    made = configs.load(schema, files, own)
    is_served = is_self_served(made) or made.llm_server.addresses or made.trainer.is_offline
    if not (is_served or NameRegistry.of(made).list("llm_server")):
        own.append("launcher.llm_servers=1")
        made = configs.load(schema, files, own)
    return made, [*(f"--config={file}" for file in files), *own]


def part_words(base: ExperimentConfig, parts: Parts) -> list[str]:
    """Return the words of `model`, `env`, `agent`, `reward`, and of the `imports` that they need.

    Raises:
        UserError: The run has no such part, or no other process can import it.
    """
    at = "trainer.ppo.collector"
    collector = base.trainer.ppo.collector
    found = dict[str, object]()
    imports = [*base.imports]
    env = collector.env.type
    if (base.trainer.is_offline or collector.envs) and (wrong := [*parts.keys() - {"model"}]):
        what = f"several environments: set {at}.envs.NAME in overrides" if collector.envs else ""
        what = what or f"no environment, because trainer.type={base.trainer.type}: remove it"
        raise UserError(f"{min(wrong)}: the run has {what}.")
    if "model" in parts:
        found["model.path"] = local_folder(str(parts["model"]))
    for name, table in (("env", envs), ("agent", agents)):
        if name in parts:
            found[f"{at}.{name}.type"], modules = registered(parts[name], table)
            imports += [module for module in modules if module not in imports]
    if "reward" in parts:
        env = str(found.get(f"{at}.env.type", env))
        key = env if env in envs.configs else envs.base_of(env)
        if reward_of(replace(collector.env, type=env)) is None:
            raise UserError(f"reward: environment {env} computes its own. Remove the argument.")
        found[f"{at}.env.{key}.reward"] = reward_options(parts["reward"])
    return words(found, imports=imports if imports != base.imports else None)


class Command:
    """A running command. Its output is in the file `log`."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "arealite.cli.main", *argv]
        own = {NESTED: "1", "PYTHONPATH": os.pathsep.join(own_folders())}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", GUARDED, "sh", *command],
                stdin=subprocess.PIPE,  # closes when this process ends, whatever the reason
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | own | {"FORCE_COLOR": ""},  # a notebook sets it
                start_new_session=True,  # Ctrl-C reaches only this process
            )
        self.log = log
        _running.add(self)

    @property
    def code(self) -> int | None:
        """The exit code; None while the command runs."""
        if (code := self.process.poll()) is not None and self.process.stdin:
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
        while not (found := line.search(self.log.read_text("utf-8", "replace"))):
            if self.code is not None:
                raise self.error("the server")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)
        return found[1]

    def error(self, what: str) -> ArealiteError:
        """Return the error of a command that failed: its end, its last error line, its log."""
        code = self.code or 0
        text = self.log.read_text("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip().startswith(ERROR)]
        why = (lines or [exit_reason(text, code)])[-1].removeprefix(ERROR)
        kind = UserError if code == UserError.exit_code else RoleError
        return kind(f"{what} failed ({how_ended(code)}): {why} Log: {self.log}")


def own_folders() -> list[str]:
    """List the folders of `sys.path` that other processes of this Python do not have."""
    installed = (f"{sys.prefix}{os.sep}", f"{sys.base_prefix}{os.sep}")
    every = [folder for folder in sys.path if folder and "-packages" not in folder]
    return [folder for folder in every if not folder.startswith(installed)]
