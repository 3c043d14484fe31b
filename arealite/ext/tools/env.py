"""Tasks that are solved with tools: the agent calls tools, turn by turn, and then answers.

The agent gets the errors of failed calls. A broken tool fails the episode.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.episode import Action
from arealite.api.observation import Observation, ToolCall
from arealite.api.reward import make_reward
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.tools.calculator import evaluate
from arealite.ext.tools.config import ArithmeticConfig, ToolsEnvConfig
from arealite.ext.tools.toolbox import States, ToolAnswer, Toolbox

HELD_OUT = 4
"""One in HELD_OUT generated tasks is left out of the split train and used by all other splits."""


class CallOutcome(NamedTuple):
    """An executed call of an episode."""

    tool_name: str
    answer_kind: str
    """See `ToolAnswer.kind`."""


class ToolsEnv(Env):
    """Offers tools, executes the calls of each turn concurrently, and scores the last answer."""

    resumable = True
    prompt_use = "first"

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
        needed_tools = task.extra_info.get("tools")
        if not isinstance(needed_tools, list | None):
            raise EpisodeError(f"{task.task_id}: extra_info.tools must be a list of tool names")

    async def setup(self) -> None:
        """Start the reward function and the tools."""
        for component in (self.scorer, self.box):
            self.cleanup.push_async_callback(component.close)
            await component.setup()

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run the agent, which calls tools, until it answers; set its reward.

        Raises:
            EpisodeError: The row is invalid, or a tool is broken.
        """
        self.check_row(task)
        if self.scorer.needs_truth:
            _ = task.truth  # raises if the row has no ground truth
        agent = agents["agent"]
        outcomes: list[CallOutcome] = []
        async with self.box.episode(task) as states:
            last_action = await self._converse(task, agent, states, outcomes)
        begin = time.perf_counter()
        correct: float | None = 0.0
        if not last_action.calls:
            correct = await self.scorer.score_task(last_action.text, task)
        agent.record.seconds_scoring += time.perf_counter() - begin
        self._set_reward(agent, task, last_action, correct, outcomes)

    def _set_reward(
        self,
        agent: Agent,
        task: Task,
        last_action: Action,
        correct: float | None,
        outcomes: Sequence[CallOutcome],
    ) -> None:
        """Set the weighted reward and its parts. It has no reward without a score and weights."""
        needed_tools = task.extra_info.get("tools")
        parts = scores(correct, outcomes, needed_tools)
        weights = {name: getattr(self.config.weights, name) for name in parts}
        weighted_scores = [weights[name] * score for name, score in parts.items()]
        is_unanswered = bool(last_action.calls) or not last_action.text
        num_calls = len(outcomes)
        kinds = Counter(outcome.answer_kind for outcome in outcomes)
        parts["unanswered"] = float(is_unanswered)
        parts["tool_calls"] = float(num_calls)
        parts["tool_errors"] = float(num_calls - kinds["fine"])
        parts |= getattr(correct, "parts", {})
        is_scored = correct is not None or any(weights.values())
        agent.reward(
            sum(weighted_scores) if is_scored else None,
            **parts,
            tool_timeouts=float(kinds["timeout"]),
        )

    async def _converse(
        self,
        task: Task,
        agent: Agent,
        states: States,
        outcomes: list[CallOutcome],
    ) -> Action:
        """Return the agent's last action. It has calls if the agent gave no answer.

        Args:
            task: The task of the episode.
            agent: The agent that calls tools.
            states: States of the tools in this episode.
            outcomes: Receives an entry for each executed call.
        """
        schemas = self.box.schemas
        observation = Observation(task.prompt, tools=schemas)
        num_turns_before_last = self.config.max_turns - 1
        for _ in range(num_turns_before_last):
            action = await agent.act(observation)
            if not action.calls or action.is_last:
                return action
            answers = await self._answer(action.calls, states)
            messages: list[dict[str, object]] = []
            for call, answer in zip(action.calls, answers, strict=True):
                outcomes.append(CallOutcome(call.name, answer.kind))
                messages.append(tool_message(call, answer))
            observation = Observation(messages, tools=schemas)
        return await agent.act(observation)

    async def _answer(self, calls: tuple[ToolCall, ...], states: States) -> list[ToolAnswer]:
        """Execute the calls of one turn concurrently; refuse calls beyond `max_calls`."""
        limit = self.config.max_calls
        executed = calls[:limit]
        refused = calls[limit:]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.box.call(call, states)) for call in executed]
        answers = [task.result() for task in tasks]
        refusal = ToolAnswer(f"error: more than {limit} calls in one turn", "malformed")
        return answers + [refusal] * len(refused)


def tool_message(call: ToolCall, answer: ToolAnswer) -> dict[str, object]:
    """Return the answer of a call as a message of a chat."""
    return {
        "role": "tool",
        "tool_call_id": call.call_id,
        "name": call.name,
        "content": answer.content,
    }


def scores(
    correct: float | None,
    outcomes: Sequence[CallOutcome],
    needed_tools: list[str] | None,
) -> dict[str, float]:
    """Return the parts of the reward by name, each from 0 to 1.

    Args:
        correct: Score of the answer; None: it has none.
        outcomes: The episode's calls.
        needed_tools: Tools that the task needs; None: the row does not list them.

    Returns:
        correct: The score of the answer, if it has one. format: The share of valid calls.
        efficiency: `correct`, reduced by calls beyond the needed ones. tool, if `needed_tools` is
        given: the share of the needed tools that were used; if none is needed, whether no tool was
        called.
    """
    num_calls = len(outcomes)
    num_malformed = sum(outcome.answer_kind == "malformed" for outcome in outcomes)
    parts: dict[str, float] = {}
    if correct is not None:
        parts["correct"] = correct
    parts["format"] = 1.0 - num_malformed / max(num_calls, 1)
    num_needed = 1
    if needed_tools is not None:
        num_needed = len(needed_tools)
        parts["tool"] = share_of_needed_tools(outcomes, needed_tools)
    if correct is not None:
        num_turns_needed = num_needed + 1
        num_turns = max(num_calls, num_needed) + 1
        parts["efficiency"] = correct * num_turns_needed / num_turns
    return parts


def share_of_needed_tools(outcomes: Sequence[CallOutcome], needed_tools: list[str]) -> float:
    """Return the share of the needed tools that were used; 1 if no tool is needed or called."""
    if not needed_tools:
        return float(not outcomes)
    needed = set(needed_tools)
    used = {outcome.tool_name for outcome in outcomes if outcome.answer_kind == "fine"}
    return len(used & needed) / len(needed)


def arithmetic(config: ArithmeticConfig, *, split: str, seed: int) -> Iterator[Row]:
    """Yield rows of arithmetic tasks without end. The split train shares no task with other splits.

    Raises:
        UserError: An operator is unknown, or the prompt has no {} for the task.
    """
    unknown_operators = set(config.operators) - set("+-*/%")
    if not config.operators or unknown_operators or "{}" not in config.prompt:
        raise UserError(
            "env.tools.arithmetic: "
            f"operators={config.operators!r} must be some of + - * / %, "
            f"and prompt={config.prompt!r} must contain {{}}, which is replaced by the task."
        )
    rng = random.Random(f"arithmetic {split} {seed}")
    while True:
        is_easy = rng.random() < config.easy
        if is_easy:
            expression = easy_expression(rng)
            data_source = "easy_arithmetic"
            needed_tools: list[str] = []
        else:
            expression = random_expression(rng, config)
            data_source = "arithmetic"
            needed_tools = ["calculator"]
        is_held_out = crc32(expression.encode()) % HELD_OUT == 0
        if is_held_out is (split == "train"):
            continue
        yield {
            "prompt": config.prompt.replace("{}", expression),
            "ground_truth": evaluate(expression),
            "extra_info": {"data_source": data_source, "tools": needed_tools},
        }


def easy_expression(rng: random.Random) -> str:
    """Return a sum of two digits that is at most 9."""
    first = rng.randrange(1, 9)
    second = rng.randrange(1, 10 - first)
    return f"{first}+{second}"


def random_expression(rng: random.Random, config: ArithmeticConfig) -> str:
    """Return an expression with the configured operands, digits and operators."""
    low = 10 ** (config.digits - 1)
    high = 10**config.digits
    expression = str(rng.randrange(low, high))
    for _ in range(config.operands - 1):
        expression += rng.choice(config.operators)
        expression += str(rng.randrange(low, high))
    return expression
