"""Options of the adapters for third-party environments."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from arealite.api.fields import Package, opt, sub
from arealite.api.runtime import EnvServersConfig
from arealite.base.extras import extra_requirement
from arealite.ext.gateway.config import GatewayConfig


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
    """A data set of reasoning-gym."""

    dataset: str = opt("chain_sum", "data set's name in reasoning-gym")
    options: dict[str, Any] = sub(dict, "data set's own options, for example options.max_terms=3")
    answer_tag: str = opt(
        "answer",
        "tag for answers: the prompt asks for <answer>…</answer>, and the last tag is scored; '': "
        "the prompt is the question alone, and the whole completion is scored",
    )
    any_scorer: bool = opt(False, "allow data sets whose scorer is wrong or executes answers")

    def packages(self) -> Iterator[Package]:
        """Yield the package of the data sets."""
        yield Package("reasoning_gym", extra_requirement("envs"))


@dataclass(frozen=True, kw_only=True)
class LibraryConfig:
    """An environment of another package."""

    env_id: str = opt("", "name of the environment, for the package's function make")
    factory: str = opt("", "module:callable that creates the environment, instead of env_id")
    kwargs: dict[str, Any] = sub(dict, "constructor arguments, like kwargs.is_slippery=false")
    illegal_reward: float = opt(0.0, "reward of an answer that is no action, or is rejected")
    max_illegal: int = opt(3, "such answers after which the episode ends", at_least=1)
    max_steps: int = opt(100, "turns after which the episode ends", at_least=1)
    threads: int = opt(8, "environments of a worker that compute at a time", at_least=1)


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig(LibraryConfig):
    """An environment with Gymnasium's API and text observations."""

    rules: str = opt("", "text before the first observation; '': the list of actions, if finite")
    repeat_rules: bool = opt(False, "repeat the rules in every turn, for agents without memory")
    actions: list[str] = sub(list, "names of the actions 0, 1, …; []: their numbers")

    def packages(self) -> Iterator[Package]:
        """Yield the package that makes the environment."""
        if not self.factory:
            yield Package("gymnasium", extra_requirement("envs"))


@dataclass(frozen=True, kw_only=True)
class GyLLMConfig(LibraryConfig):
    """An environment with GyLLM's API of Requests."""

    seats: list[str] = sub(lambda: ["agent"], "actors, for example [player_a,player_b]")
    options: dict[str, Any] = sub(dict, "options of reset, besides the task's seed")

    def packages(self) -> Iterator[Package]:
        """Yield the package that makes the environment."""
        if not self.factory:
            yield Package("gyllm", "gyllm")


@dataclass(frozen=True, kw_only=True)
class TextArenaConfig:
    """A game of TextArena."""

    env_id: str = opt("", "id for textarena.make")
    kwargs: dict[str, Any] = sub(dict, "constructor arguments")
    players: int = opt(2, "number of seats: player_0, player_1, …", at_least=1)
    observation: Literal["new", "whole"] = opt(
        "new", "new: events since the player's last turn; whole: all, for agents without memory"
    )
    max_turns: int = opt(200, "turns after which a game ends without a reward", at_least=1)

    def packages(self) -> Iterator[Package]:
        """Yield the package of the games."""
        yield Package("textarena", extra_requirement("envs"))


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig(EnvServersConfig):
    """Environments behind OpenEnv servers."""

    observation: list[str] = sub(list, "fields in the prompt; []: the only text, else all as JSON")
    action: Any = opt(
        None,
        "template of the action: {text} is the completion, {json} the completion parsed as JSON; "
        "null: {message: '{text}'}",
    )
    instruction: str = opt(
        "Act in the environment: answer each observation with your next action.",
        "prompt of generated tasks; each prompt precedes the first observation",
    )
    max_steps: int = opt(100, "steps after which the episode ends", at_least=1)


@dataclass(frozen=True, kw_only=True)
class VerifiersConfig:
    """An environment of the library verifiers."""

    id: str = opt("", "name of the environment (taskset) in verifiers, an installed package")
    options: dict[str, Any] = sub(
        dict, "verifiers' own options of the environment, like options.agent.max_turns=8"
    )
    seats: list[str] = sub(
        lambda: ["agent"], "agents of the environment, each a seat; others use the first seat"
    )
    gateway: GatewayConfig = sub(GatewayConfig, "the HTTP server of the agents")

    def packages(self) -> Iterator[Package]:
        """Yield the package of the environments."""
        yield Package("verifiers", extra_requirement("verifiers"))
