"""`arealite serve`: its config, and the messages between an environment's server and its clients.

OpenEnv's wire format: JSON over a WebSocket, each message answered by one. What OpenEnv leaves to
an environment, its observations and actions, are View and Step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from arealite.api.env_config import EnvConfig
from arealite.api.fields import opt, sub
from arealite.api.observation import ToolCall
from arealite.api.trial import TrialConfig


@dataclass(frozen=True, kw_only=True)
class EnvServerOptions:
    """Where it listens, and what it bears."""

    host: str = opt("127.0.0.1", "address to bind; anything but loopback opens it to the network")
    port: int = opt(0, "0 takes a free port", at_least=0, at_most=65535)
    token_env: str = opt("", "environment variable with the bearer token that clients must send")
    max_sessions: int = opt(1024, "episodes at a time; who comes then is refused", at_least=1)
    max_message_kb: int = opt(1024, "longest message, in both directions", at_least=1)
    idle_s: float = opt(900.0, "a session without a message for this long is closed", above=0)
    episode_s: float = opt(3600.0, "longer episodes fail", above=0)
    log_level: Literal["debug", "info", "warning", "error"] = opt("info", "what is logged")


@dataclass(frozen=True, kw_only=True)
class EnvServerConfig(TrialConfig):
    """Root of `arealite serve`; names and cluster are for the environment."""

    tasks: str = opt("generated", "path of the rows of a reset without a task, or `generated`")
    env: EnvConfig = sub(EnvConfig, "which environment")
    server: EnvServerOptions = sub(EnvServerOptions, "the server")


class Message(msgspec.Struct):
    """What a client sends."""

    type: str
    """reset, step, state or close."""
    data: msgspec.Raw = msgspec.Raw(b"{}")


class Reset(msgspec.Struct):
    """Begin an episode, of a task or of one that the server draws."""

    task: dict[str, Any] | None = None
    """A row: `prompt`, `ground_truth`, `extra_info`, and perhaps `task_id`."""
    seed: int | None = None
    """Which row to draw; None: the next one."""
    split: str = "train"
    episode_id: str | None = None
    untrained: tuple[str, ...] = ()
    """Seats whose agents are not trained."""


class Step(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a seat does."""

    text: str
    seat: str = ""
    """"" where only one waits."""
    turn: int = 0
    """Which of the seat's waits is answered; 0: the one there is."""
    calls: tuple[ToolCall, ...] = ()
    is_last: bool = False
    stop_reason: str = ""
    """Of the generation behind it; "" where there was none."""
    metadata: dict[str, Any] = {}
    """OpenEnv's actions have it; not used."""


class Wait(msgspec.Struct, frozen=True, omit_defaults=True):
    """A seat that is to act, and what it sees."""

    seat: str = ""
    turn: int = 0
    """1, 2, …: by it a client tells a new wait from one that it was told before."""
    content: str | list[dict[str, Any]] = ""
    choices: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


class Given(msgspec.Struct, frozen=True):
    """A reward, as the environment gave it."""

    seat: str
    turn: int
    """The seat's last finished turn when it was given."""
    value: float
    parts: dict[str, float]


class View(Wait, frozen=True, omit_defaults=True):
    """An observation: that of the seat in an environment with one, else of all that wait."""

    waiting: list[Wait] = []
    rewards: list[Given] = []
    """Those since the last answer."""


class Reply(msgspec.Struct, frozen=True):
    """The answer to reset and step."""

    observation: View
    reward: float | None = None
    """The sum of `rewards`; None with several seats, or where none was given."""
    done: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """The answer to a message that brought no observation."""

    message: str
    code: str = "EXECUTION_ERROR"
    """OpenEnv's: INVALID_JSON, UNKNOWN_TYPE, VALIDATION_ERROR, EXECUTION_ERROR,
    CAPACITY_REACHED."""
    failure_class: str = ""
    """Of a failed episode, as `errors.failure_class` names it; "": the session is as it was."""
