"""Options of agents that are not AReaLite's: a function, a program, or programs elsewhere."""

import os
import re
import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

from arealite.api.fields import Constraints, EnvOptions, opt, sub
from arealite.api.reward import RewardConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.registry import unknown
from arealite.ext.gateway.config import GatewayConfig
from arealite.ext.tools.config import ArithmeticConfig

PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*|\{\w+\})\}")
"""Matches {name}, and {{name}}, which stands for the text {name}. ${name} is left to shells."""


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(EnvOptions):
    """An agent that talks to the model through the gateway. Set one of run, command and pull."""

    run: str = opt("", "function that plays an episode: file.py:name or module:name")
    command: list[str] = sub(list, "program that plays an episode: [claude,-p,'{prompt}']")
    pull: bool = opt(False, "agents elsewhere lease the tasks: POST /v1/rl/sessions")
    seats: list[str] = sub(lambda: ["agent"], "names of the seats; each has its own API key")
    reward_from: Literal["auto", "return", "file", "last_line", "posted", "function"] = opt(
        "auto", "source of the reward; auto: what the agent gave, else the option `reward`"
    )
    reward_file: str = opt("reward.json", "file that `command` writes: a number or an object")
    reward: RewardConfig = sub(RewardConfig, "reward function of the answer")
    environment: dict[str, str] = sub(dict, "environment of `command`; $NAME: the worker's")
    ok_codes: list[int] = sub(lambda: [0], "exit codes of `command` that are no failure")
    sandbox: bool = opt(False, "run `command` in bubblewrap: its folder, and only the gateway")
    readable: list[str] = sub(list, "further files and folders that the sandbox can read")
    idle_s: float = opt(600.0, "time without a request after which a leased task fails", above=0)
    arithmetic: ArithmeticConfig = sub(ArithmeticConfig, "tasks of dataset.train=generated")
    gateway: GatewayConfig = sub(GatewayConfig, "the HTTP server of the agents")

    def constraints(self) -> Constraints:
        """Yield the constraints of each way to run an agent."""
        source = self.reward_from
        needed_option = {"return": "run", "file": "command", "last_line": "command"}.get(source)
        has_source = needed_option is None or bool(getattr(self, needed_option))
        yield (
            has_source,
            (
                f"reward_from={source} needs {needed_option}. "
                f"Set {needed_option}, or reward_from=auto."
            ),
        )
        yield (
            _are_seat_names(self.seats),
            f"seats={self.seats}. Give each seat a name of its own, of letters, digits and _.",
        )
        yield (
            bool(self.command) or not self.sandbox,
            "sandbox=true needs a `command`. Set command, or sandbox=false.",
        )
        is_on_loopback = not (self.gateway.host or self.gateway.public_host)
        yield (
            is_on_loopback or not self.sandbox,
            (
                "sandbox=true: programs reach the gateway on loopback only. "
                "Remove gateway.host and public_host."
            ),
        )
        yield (
            bool(self.gateway.token_env) or not self.pull,
            (
                "pull=true needs gateway.token_env, a variable with the token of the agents. "
                "Export it, and set its name."
            ),
        )

    reads_columns: ClassVar[bool] = True

    def check_task(self, task: Task, folder: str = "") -> list[str]:
        """Return the words of `command` for a task and its folder.

        Raises:
            UserError: A word has an unknown placeholder.
        """
        values_by_name = {
            **task.columns,
            **task.extra_info,
            "prompt": task.text,
            "task_id": task.task_id,
            "folder": folder,
            "cwd": os.getcwd(),
            "python": sys.executable,
        }

        def fill(placeholder: re.Match[str]) -> str:
            name = placeholder[1]
            is_escaped = name.startswith("{")
            if is_escaped:
                return str(values_by_name.get(name, name))
            if name not in values_by_name:
                raise UserError(
                    f"env.harness.command: {unknown('placeholder', name, [*values_by_name])} "
                    f"{{{{{name}}}}} stands for the text {{{name}}}."
                )
            return str(values_by_name[name])

        return [PLACEHOLDER.sub(fill, word) for word in self.command]


def _are_seat_names(seats: list[str]) -> bool:
    """Return whether names of seats are distinct and can be parameters of the function `run`."""
    if not seats or len({*seats}) < len(seats):
        return False
    return all(name.isidentifier() and name not in ("self", "task") for name in seats)
