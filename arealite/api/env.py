"""An environment is an async program: one episode is one call of `run`, in plain Python control
flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from arealite.api.agent import Agent
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.registry import Registry


class Env(ABC):
    """A world that agents act in. One instance a worker process; `run` is called concurrently."""

    seats: tuple[str, ...] = ("agent",)
    """Names of the keyword arguments under which `run` gets its agents."""
    resumable: bool = False
    """Whether `run`, called anew with the same task and the same generations, does the same: it
    draws nothing at random, reads no clock, each seat generates one turn at a time, and what it
    does outside may be done twice. Then an episode whose worker died goes on from its last durable
    turn: `run` begins again, and the agents' first generations are the recorded ones. Rewards are
    computed again. Where a prompt is another one after all, sampling goes on from there."""

    def __init__(self, args: Any, config: Any) -> None:
        self.args = args
        """The run's ExperimentConfig; read only names and cluster from it."""
        self.config = config
        """This environment's own config."""

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield rows of tasks (`prompt`, `ground_truth`, `extra_info`) without end, for
        `dataset.train=generated`: the same for the same arguments, others for another `split`.

        Raises:
            UserError: this environment makes no tasks.
        """
        raise UserError(
            f"{cls.__name__} makes no tasks itself. Set dataset.train and dataset.eval to files."
        )

    @staticmethod  # noqa: B027  (optional hook)
    def check_row(task: Task, /) -> object:
        """Raise an exception if `run` could not use this row of a file.

        A run calls this for the first rows of each file, before any process starts.

        Raises:
            Exception: the row is unusable; its text is shown with the file and the line.
        """

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Start what is shared and costly: a browser, a pool of sandboxes."""

    @abstractmethod
    async def run(self, task: Task, **agents: Agent) -> None:
        """Play one episode: let agents act and give them rewards.

        Raises:
            EpisodeError: the episode failed; it is counted and offered again, never rewarded.
        """

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Stop what `setup` started, also where it failed half-way."""


@dataclass(frozen=True)
class StepResult:
    """What a step of a StepEnv gives back."""

    observation: Any
    reward: float
    done: bool


class StepEnv(Env):
    """For those who prefer reset and step: one acting seat, Gymnasium-like. State is per
    episode."""

    @abstractmethod
    async def reset(self, task: Task) -> tuple[Any, Any]:
        """Begin an episode; return (state, first observation)."""

    @abstractmethod
    async def step(self, state: Any, action: Any) -> StepResult:
        """Apply one action to the episode's state."""

    async def run(self, task: Task, **agents: Agent) -> None:
        """Step until done, or until the agent acts no more."""
        (agent,) = agents.values()
        state, observation = await self.reset(task)
        done = False
        while not done:
            result = await self.step(state, action := await agent.act(observation))
            agent.reward(result.reward)
            observation, done = result.observation, result.done or action.is_last


envs: Registry[Env] = Registry(
    "env",
    {
        "math": "arealite.impl.env.math.env:MathEnv",
        "code": "arealite.impl.env.code.env:CodeEnv",
        "tools": "arealite.impl.env.tools:ToolsEnv",
        "debate": "arealite.impl.env.debate.env:DebateEnv",
        "tic_tac_toe": "arealite.impl.env.games.tic_tac_toe:TicTacToeEnv",
        "matrix_game": "arealite.impl.env.games.matrix_game:MatrixGameEnv",
        "iterated_prisoners_dilemma": "arealite.impl.env.games.matrix_game:PrisonersDilemmaEnv",
        "reverse": "arealite.impl.env.games.reverse:ReverseEnv",
        "reverse_echo": "arealite.impl.env.games.reverse:ReverseEchoEnv",
        "browser": "arealite.impl.env.web.miniwob:BrowserEnv",
        "webarena": "arealite.impl.env.web.webarena:WebArenaEnv",
        "reasoning_gym": "arealite.impl.env.adapters.reasoning_gym:ReasoningGymEnv",
        "gymnasium": "arealite.impl.env.adapters.gymnasium:GymnasiumEnv",
        "gyllm": "arealite.impl.env.adapters.gyllm:GyLLMEnv",
        "textarena": "arealite.impl.env.adapters.textarena:TextArenaEnv",
        "openenv": "arealite.impl.env.adapters.openenv:OpenEnvEnv",
    },
)
