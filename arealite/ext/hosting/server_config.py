"""`arealite serve`: its config, and the messages between an environment server and its clients.

The wire format is OpenEnv's: JSON over a WebSocket, one reply to each message. OpenEnv leaves the
format of observations and actions to the environment; here they are EnvObservation and Step.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from arealite.api.env import EnvConfig
from arealite.api.fields import opt, sub
from arealite.api.observation import ToolCall
from arealite.api.trial import TrialConfig


@dataclass(frozen=True, kw_only=True)
class EnvServerOptions:
    """Address and limits of an environment server."""

    host: str = opt("127.0.0.1", "address to bind; other than loopback: open to the network")
    port: int = opt(
        0,
        "port; 0: a free port",
        at_least=0,
        at_most=65535,
    )
    token_env: str = opt("", "environment variable with the bearer token that clients must send")
    max_sessions: int = opt(1024, "concurrent episodes; further ones are refused", at_least=1)
    max_message_kb: int = opt(1024, "longest message, in both directions", at_least=1)
    idle_s: float = opt(900.0, "close a session after this long without a message", above=0)
    episode_s: float = opt(3600.0, "longest episode; longer ones fail", above=0)
    log_level: Literal["debug", "info", "warning", "error"] = opt(
        "info",
        "lowest level to log",
    )


@dataclass(frozen=True, kw_only=True)
class EnvServerConfig(TrialConfig):
    """Root of `arealite serve`. The environment gets the names and the cluster."""

    environments: list[str] = sub(list, "environment types, the first is the default; []: env.type")
    tasks: str = opt(
        "generated",
        "path of the default environment's rows for resets without a task, or `generated`",
    )
    env: EnvConfig = sub(EnvConfig, "the environment, and the options of all `environments`")
    server: EnvServerOptions = sub(EnvServerOptions, "the server")

    @property
    def hosted(self) -> dict[str, EnvConfig]:
        """The config of each environment by its type; the default environment is the first."""
        env_types = self.environments or [self.env.type]
        return {env_type: replace(self.env, type=env_type) for env_type in env_types}


class SessionMessage(msgspec.Struct, kw_only=True):
    """A message of a client or of a server."""

    type: str
    """A client sends the types reset, step, state and close."""
    data: msgspec.Raw = msgspec.Raw(b"{}")


class Reset(msgspec.Struct, kw_only=True):
    """Begin an episode."""

    task: dict[str, Any] | None = None
    """A row: `prompt`, `ground_truth`, `extra_info`, optional `task_id`. None: the server draws."""
    seed: int | None = None
    """Seed that selects the row to draw; None: the next row."""
    env: str = ""
    """Type of the environment, of a server with several; "": that of the path, or the default."""
    split: str = "train"
    episode_id: str | None = None
    untrained: tuple[str, ...] = ()
    """Seats whose agents are not trained."""


class Step(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The action of a seat."""

    text: str
    seat: str = ""
    """"": the only seat that has to act."""
    turn: int = 0
    """`turn` of the SeatObservation that this action answers; 0: the pending one."""
    calls: tuple[ToolCall, ...] = ()
    is_last: bool = False
    stop_reason: str = ""
    """stop_reason of the generation; "" without a generation."""
    metadata: dict[str, Any] = {}
    """A field of OpenEnv's actions; not used."""


class SeatObservation(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The observation of a seat that has to act."""

    seat: str = ""
    turn: int = 0
    """1, 2, …: the number of the seat's observation; a repeated number is a repeated message."""
    content: str | list[dict[str, Any]] = ""
    choices: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


class SeatReward(msgspec.Struct, frozen=True, kw_only=True):
    """A reward of a seat."""

    seat: str
    turn: int
    """The seat's last finished turn at the time of the reward."""
    value: float | None
    """None: the seat has no score in this episode."""
    parts: dict[str, float]


class EnvObservation(SeatObservation, frozen=True, omit_defaults=True, kw_only=True):
    """The observation of the only seat, or, with several seats, of all that have to act."""

    waiting: list[SeatObservation] = []
    rewards: list[SeatReward] = []
    """Rewards since the last reply."""


class StepReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to reset and step."""

    observation: EnvObservation
    reward: float | None = None
    """The sum of `rewards`; None with several seats, without rewards, or without a score."""
    done: bool = False


class SessionFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a message that failed."""

    message: str
    code: str = "EXECUTION_ERROR"
    """A code of OpenEnv: INVALID_JSON, UNKNOWN_TYPE, VALIDATION_ERROR, EXECUTION_ERROR,
    CAPACITY_REACHED."""
    failure_class: str = ""
    """`errors.failure_class` of a failed episode; "": the session is unchanged."""
