"""Tasks that are solved with tools: the agent calls tools, turn by turn, and then answers.

The agent gets the errors of failed calls. A broken tool fails the episode.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from zlib import crc32

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.episode import Action
from arealite.api.observation import Observation, ToolCall
from arealite.api.reward import make_reward
from arealite.api.task import Row, Task
from arealite.api.tool_config import ArithmeticConfig, ToolsEnvConfig
from arealite.api.trial import TrialConfig
from arealite.base.errors import EpisodeError, UserError
from arealite.impl.tool.calculator import evaluate
from arealite.impl.tool.toolbox import Answer, States, Toolbox

Calls = list[tuple[str, str]]
"""Of each call, the name of the tool and the kind of its answer."""
HELD_OUT = 4
"""One in HELD_OUT generated tasks is left out of the split train and used by all other splits."""


class ToolsEnv(Env):
    """Offers tools, executes the calls of each turn concurrently, and scores the last answer."""

    resumable = True

    def __init__(self, args: TrialConfig, config: ToolsEnvConfig) -> None:
        super().__init__(args, config)
        self.scorer = make_reward(config.reward)
        self.box = Toolbox(config)
        self.resumable = self.box.deterministic

    @classmethod
    def rows(cls, config: ToolsEnvConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield arithmetic tasks by `config.arithmetic`, without end."""
        return arithmetic(config.arithmetic, split=split, seed=seed)

    @staticmethod
    def check_row(task: Task, /) -> None:
        """Check that the row's `tools`, if any, are a list.

        Raises:
            EpisodeError: The row is invalid.
        """
        if not isinstance(task.extra_info.get("tools"), list | None):
            raise EpisodeError(f"{task.task_id}: extra_info.tools must be a list of tool names")

    async def setup(self) -> None:
        """Start the reward function and the tools."""
        for part in (self.scorer, self.box):
            self.cleanup.push_async_callback(part.close)
            await part.setup()

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run the agent, which calls tools, until it answers; set its reward.

        Raises:
            EpisodeError: The row is invalid, or a tool is broken.
        """
        self.check_row(task)
        _ = self.scorer.needs_truth and task.truth
        agent = agents["agent"]
        calls = Calls()
        wanted = task.extra_info.get("tools")
        async with self.box.episode(task) as states:
            action = await self._converse(task, agent, states, calls)
        begin = time.perf_counter()
        correct: float | None = 0.0
        if not action.calls:
            correct = await self.scorer.score_task(action.text, task)
        agent.record.seconds_scoring += time.perf_counter() - begin
        parts = scores(correct, calls, wanted)
        kinds = Counter(kind for _, kind in calls)
        weights = {name: getattr(self.config.weights, name) for name in parts}
        value = sum(weights[name] * part for name, part in parts.items())
        parts["unanswered"] = float(bool(action.calls) or not action.text)
        parts["tool_calls"] = float(len(calls))
        parts["tool_errors"] = parts["tool_calls"] - kinds["fine"]
        parts |= getattr(correct, "parts", {})
        is_scored = correct is not None or any(weights.values())
        agent.reward(value if is_scored else None, **parts, tool_timeouts=float(kinds["timeout"]))

    async def _converse(self, task: Task, agent: Agent, states: States, calls: Calls) -> Action:
        """Return the agent's last action. It has calls if the agent gave no answer."""
        observation = Observation(task.prompt, tools=self.box.schemas)
        for _ in range(self.config.max_turns - 1):
            action = await agent.act(observation)
            if not action.calls or action.is_last:
                return action
            answers = await self._answer(action.calls, states)
            messages: list[dict[str, object]] = []
            for call, answer in zip(action.calls, answers, strict=True):
                calls.append((call.name, answer.kind))
                message = {"role": "tool", "tool_call_id": call.call_id, "name": call.name}
                messages.append({**message, "content": answer.content})
            observation = Observation(messages, tools=self.box.schemas)
        return await agent.act(observation)

    async def _answer(self, calls: tuple[ToolCall, ...], states: States) -> list[Answer]:
        """Execute the calls of one turn concurrently; refuse calls beyond `max_calls`."""
        limit = self.config.max_calls
        async with asyncio.TaskGroup() as group:
            made = [group.create_task(self.box.call(call, states)) for call in calls[:limit]]
        refused = Answer(f"error: more than {limit} calls in one turn", "malformed")
        return [*(task.result() for task in made), *[refused] * len(calls[limit:])]


def scores(correct: float | None, calls: Calls, wanted: list[str] | None) -> dict[str, float]:
    """Return the parts of the reward by name, each from 0 to 1.

    Args:
        correct: Score of the answer; None: it has none.
        calls: The episode's calls.
        wanted: Tools that the task needs; None: the row does not list them.

    Returns:
        correct: The score of the answer, if it has one. format: The share of valid calls.
        efficiency: `correct`, reduced by calls beyond the needed ones. tool, if `wanted` is given:
        the share of the needed tools that were used; if none is needed, whether no tool was called.
    """
    malformed = sum(kind == "malformed" for _, kind in calls)
    parts = {} if correct is None else {"correct": correct}
    parts["format"] = 1.0 - malformed / max(len(calls), 1)
    needed = 1
    if wanted is not None:
        needed = len(wanted)
        used = {name for name, kind in calls if kind == "fine"}.intersection(wanted)
        parts["tool"] = len(used) / len({*wanted}) if wanted else float(not calls)
    if correct is not None:
        parts["efficiency"] = correct * (needed + 1) / (max(len(calls), needed) + 1)
    return parts


def arithmetic(config: ArithmeticConfig, *, split: str, seed: int) -> Iterator[Row]:
    """Yield rows of arithmetic tasks without end. The split train shares no task with other splits.

    Raises:
        UserError: An operator is unknown, or the prompt has no {} for the task.
    """
    if not config.operators or set(config.operators) - set("+-*/%") or "{}" not in config.prompt:
        signs = f"operators={config.operators!r} must be some of + - * / %"
        text = f"prompt={config.prompt!r} must contain {{}}, which is replaced by the task"
        raise UserError(f"env.tools.arithmetic: {signs}, and {text}.")
    rng = random.Random(f"arithmetic {split} {seed}")
    low = 10 ** (config.digits - 1)
    high = 10**config.digits
    while True:
        if is_easy := rng.random() < config.easy:
            first = rng.randrange(1, 9)
            task = f"{first}+{rng.randrange(1, 10 - first)}"
        else:
            task = str(rng.randrange(low, high))
            for _ in range(config.operands - 1):
                task += rng.choice(config.operators) + str(rng.randrange(low, high))
        if (crc32(task.encode()) % HELD_OUT == 0) is (split == "train"):
            continue
        extra_info = {"data_source": "arithmetic", "tools": ["calculator"]}
        if is_easy:
            extra_info = {"data_source": "easy_arithmetic", "tools": list[str]()}
        prompt = config.prompt.replace("{}", task)
        yield {"prompt": prompt, "ground_truth": evaluate(task), "extra_info": extra_info}
