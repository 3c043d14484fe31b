"""An agent, an environment, a reward, an LLM server, a command and a hook."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from zlib import crc32

from arealite import Action, Agent, Env, Reward, Row, Score, Task, UserError
from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.api.fields import opt, sub
from arealite.api.llm_server import LLMServer, servers
from arealite.api.reward import RewardConfig, make_reward
from arealite.system.data.templates import tokenize
from orchard import trace


@dataclass(frozen=True, kw_only=True)
class PickerConfig:
    """Options of the agent."""

    question: str = opt("?", "end of each prompt")


class Picker(Agent):
    """Ends each observation with its question."""

    async def act(self, observation: object) -> Action:
        prompt = f"{observation}{self.config.question}"
        trace("agent", prompt)
        response = await self.generate(tokenize(self.tokenizer, prompt))
        text = self.tokenizer.decode(response.output_ids, skip_special_tokens=True)
        return Action(text, response)


@dataclass(frozen=True, kw_only=True)
class OrchardConfig:
    """Options of the environment."""

    trees: int = opt(3, "number of different tasks", at_least=1)
    reward: RewardConfig = sub(RewardConfig, "reward of an answer")


class Orchard(Env):
    """Asks for apples of a tree."""

    @classmethod
    def rows(cls, config: OrchardConfig, *, split: str, seed: int) -> Iterator[Row]:
        for number in count():
            yield {"prompt": f"{split} tree {number % config.trees}", "ground_truth": "a"}

    async def setup(self) -> None:
        self.scorer = make_reward(self.config.reward)
        await self.scorer.setup()
        self.cleanup.push_async_callback(self.scorer.close)

    async def run(self, task: Task, **agents: Agent) -> None:
        trace("env", task.text)
        action = await agents["agent"].act(task.text)
        score = await self.scorer.score_task(action.text, task)
        agents["agent"].reward(score, **score.parts)


class Ripeness(Reward):
    """A checksum of the text in [0, 1): different answers get different rewards.

    A step in which all rewards of each group are equal updates nothing, and says no gradient norm.
    """

    async def score(self, completion: str, ground_truth: str) -> float:
        trace("reward", ground_truth)
        ripeness = crc32(completion.encode()) / 2**32
        return Score(ripeness, ripe=ripeness)


class AppleServer(LLMServer):
    """The embedded server, of which this one knows only the name."""

    def __init__(self, args: ServerConfig) -> None:
        self.inner = servers.get("embedded")(args)

    async def serve(self) -> None:
        trace("server", "begin")
        try:
            await self.inner.serve()
        finally:
            trace("server", "end")


def harvest(argv: Sequence[str]) -> int:
    """Print the number of apples: the command `arealite harvest NUMBER`."""
    if not argv or not argv[0].isdigit():
        raise UserError("arealite harvest needs the number of apples")
    print(f"{argv[0]} apples")
    return 0


def greet(config: ExperimentConfig, engine: Any, world: Any, version: int) -> None:
    """Hook after_first_publish."""
    trace("hook", config.trial_name, version)
