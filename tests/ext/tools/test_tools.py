"""Tasks solved with tools: turns, answers, parts of the reward, and generated arithmetic."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from typing import Any

import pytest

from arealite.api.agent import Agent, AgentFactory
from arealite.api.collector_config import AgentConfig
from arealite.api.env import EnvConfig, make_env
from arealite.api.episode import Action
from arealite.api.observation import Observation, ToolCall
from arealite.api.reward import Reward, RewardConfig, rewards
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.demo.tiny_model import PRINTABLE, make_tokenizer
from arealite.ext.tools.calculator import evaluate
from arealite.ext.tools.config import ArithmeticConfig, ToolsEnvConfig, ToolsRewardConfig
from arealite.ext.tools.env import ToolsEnv
from arealite.ext.tools.toolbox import ToolCrash
from arealite.impl.rollout.collector import Collector
from tests.ext.tools import test_toolbox  # registers the tool `odd`
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease, tokenizer

assert test_toolbox
Script = list[Any]
"""One entry per turn: an answer, or calls."""


@rewards.register("same")
class Same(Reward):
    """Score 1 if the answer is the ground truth, else 0."""

    async def score(self, completion: str, ground_truth: str) -> float | None:
        return None if completion == "unknown" else float(completion == ground_truth)


class Actor(Agent):
    """Records a generated turn, then acts by a script."""

    script: Script
    env: ToolsEnv
    is_last_at: int | None = None

    async def act(self, observation: Any) -> Action:
        self.seen: list[Observation] = [*getattr(self, "seen", ()), observation]
        done = await self.generate([1])
        turn = self.script[len(self.seen) - 1]
        is_last = len(self.seen) == self.is_last_at
        if isinstance(turn, str):
            return Action(turn, done, is_last=is_last)
        return Action("calling", done, tuple(turn), is_last)


def call(name: str, call_id: str = "c", **arguments: Any) -> ToolCall:
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def calc(expression: str, call_id: str = "c") -> ToolCall:
    return call("calculator", call_id, expression=expression)


def actor(*script: Any) -> Actor:
    client = ScriptedClient(lambda _: response([10]))
    factory = AgentFactory(None, client=client, tokenizer=tokenizer())
    made = factory.make_agent(AgentConfig())
    agent = Actor(None, client=made.client, tokenizer=made.tokenizer, seat=made.seat)
    agent.script = list(script)
    return agent


@pytest.fixture
async def play():
    """Return a function that plays an episode and returns the agent."""
    opened: list[ToolsEnv] = []

    async def run(
        agent: Actor, *, truth: str = "42", info: dict[str, Any] | None = None, **config: Any
    ) -> Actor:
        own = ToolsEnvConfig(reward=RewardConfig(type="same"), **config)
        env = make_env(None, EnvConfig(type="tools", tools=own))
        await env.setup()
        opened.append(env)
        agent.env = env
        await env.run(
            Task(task_id="t-1", prompt="6*7?", ground_truth=truth, extra_info=info or {}),
            agent=agent,
        )
        return agent

    yield run
    for env in opened:
        await env.close()


async def test_answer_without_a_score_leaves_out_the_parts_that_depend_on_it(play) -> None:
    agent = await play(actor("unknown"))
    assert agent.record.is_unscored
    assert agent.record.reward_parts.keys().isdisjoint({"correct", "efficiency"})
    agent = await play(actor("unknown"), weights=ToolsRewardConfig(correct=1.0, format=0.5))
    assert not agent.record.is_unscored
    assert agent.record.turns[-1].reward == 0.5


async def test_calls_are_answered_in_order_and_the_answer_is_scored(play) -> None:
    agent = await play(actor([calc("6*7", "a"), calc("1/0", "b")], "42"))
    first, second = agent.seen
    assert first.content == "6*7?"
    assert [tool["function"]["name"] for tool in first.tools] == ["calculator"]
    assert second.tools == first.tools
    assert second.content == [
        {"role": "tool", "tool_call_id": "a", "name": "calculator", "content": "42"},
        {
            "role": "tool",
            "tool_call_id": "b",
            "name": "calculator",
            "content": "error: division by zero",
        },
    ]
    assert [turn.reward for turn in agent.record.turns] == [0.0, 1.0]
    assert agent.record.reward_parts == {
        "correct": 1.0,
        "format": 1.0,
        "efficiency": 2 / 3,
        "unanswered": 0.0,
        "tool_calls": 2.0,
        "tool_errors": 1.0,
        "tool_timeouts": 0.0,
    }


async def test_answer_without_a_call_is_scored(play) -> None:
    agent = await play(actor("41"))
    assert agent.record.turns[-1].reward == 0.0
    assert agent.record.reward_parts["correct"] == agent.record.reward_parts["tool_calls"] == 0.0


async def test_agent_that_never_answers_is_stopped_at_max_turns(play) -> None:
    agent = await play(actor(*[[calc("6*7")]] * 3), max_turns=3)
    parts = agent.record.reward_parts
    assert len(agent.record.turns) == 3
    assert (parts["unanswered"], parts["correct"], parts["tool_calls"]) == (1.0, 0.0, 2.0)


async def test_agent_does_not_act_after_its_last_action(play) -> None:
    agent = actor([calc("6*7")], "42")
    agent.is_last_at = 1
    parts = (await play(agent)).record.reward_parts
    assert (parts["unanswered"], parts["tool_calls"]) == (1.0, 0.0)


async def test_calls_beyond_max_calls_are_refused(play) -> None:
    agent = await play(actor([calc("1"), calc("2"), calc("3")], "42"), max_calls=2)
    told = [message["content"] for message in agent.seen[1].content]
    assert told == ["1", "2", "error: more than 2 calls in one turn"]
    assert agent.record.reward_parts["format"] == pytest.approx(2 / 3)


WEIGHTS = ToolsRewardConfig(correct=1.0, tool=0.5, format=0.25, efficiency=0.125)


@pytest.mark.parametrize(
    ("script", "wanted", "reward"),
    [
        ([[calc("6*7")], "42"], ["calculator"], 1.0 + 0.5 + 0.25 + 0.125),
        ([[calc("6*7")], "42"], ["calculator", "odd"], 1.0 + 0.25 + 0.25 + 0.125),
        ([[calc("6*1"), calc("6*7")], "42"], ["calculator"] * 2, 1.0 + 0.5 + 0.25 + 0.125),
        ([[calc("6*7")], "42"], [], 1.0 + 0.0 + 0.25 + 0.125 / 2),
        ([[calc("6*7")], "42"], None, 1.0 + 0.25 + 0.125),
        (["42"], [], 1.0 + 0.5 + 0.25 + 0.125),
        (["42"], ["calculator"], 1.0 + 0.25 + 0.125),
        ([[calc("6*")], "0"], ["calculator"], 0.25),
        ([[call("calc")], "0"], ["calculator"], 0.0),
        ([[calc("1")], [calc("1")], [calc("1")], "42"], ["calculator"], 1.75 + 0.125 / 2),
    ],
)
async def test_reward_is_the_weighted_sum_of_its_parts(play, script, wanted, reward) -> None:
    info = {} if wanted is None else {"tools": wanted}
    agent = await play(actor(*script), info=info, weights=WEIGHTS)
    assert agent.record.turns[-1].reward == pytest.approx(reward)


async def test_calls_of_a_turn_run_concurrently(play) -> None:
    hang = [call("odd", what="hang") for _ in range(2)]
    agent = await play(actor([*hang, call("odd", what="a")], "42"), tools=["odd"], timeout_s=0.2)
    assert agent.env.box.tools["odd"].most == 2
    told = [message["content"] for message in agent.seen[1].content]
    assert told == ["error: timed out after 0.2 s"] * 2 + ["a 3"]
    assert agent.record.reward_parts["tool_timeouts"] == 2.0


async def test_broken_tool_fails_the_episode_and_cancels_its_other_calls(play) -> None:
    agent = actor([call("odd", what="hang"), call("odd", what="crash")], "42")
    with pytest.raises(ExceptionGroup) as raised:
        await play(agent, tools=["odd"])
    assert [type(error) for error in raised.value.exceptions] == [ToolCrash]
    assert not agent.record.reward_parts


async def test_cancelled_episode_cancels_calls_and_ends_the_tools_state(play) -> None:
    env = ToolsEnv(None, ToolsEnvConfig(tools=["odd"], reward=RewardConfig(type="same")))
    await env.setup()
    odd = env.box.tools["odd"]
    agent = actor([call("odd", what="hang")], "42")
    task = asyncio.create_task(
        env.run(Task(task_id="t", prompt="?", ground_truth="1", extra_info={}), agent=agent)
    )
    await odd.hangs.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert odd.at_once == 0
    assert odd.log == ["setup", ("end", 1)]
    await env.close()


async def test_task_without_ground_truth_fails_before_generating(play) -> None:
    agent = actor("42")
    with pytest.raises(EpisodeError, match="ground_truth"):
        await play(agent, truth=None)
    with pytest.raises(EpisodeError, match="must be a list of tool names"):
        await play(agent, info={"tools": "calculator"})
    assert not agent.record.turns


async def test_agent_without_room_for_an_answer_is_unanswered(play) -> None:
    assert (await play(actor([calc("6*7")], ""))).record.reward_parts["unanswered"] == 1.0


def draw(count: int = 200, split: str = "train", seed: int = 1, **config: Any) -> list[Any]:
    own = ToolsEnvConfig(arithmetic=ArithmeticConfig(**config))
    return [*islice(ToolsEnv.rows(own, split=split, seed=seed), count)]


def test_generated_tasks_are_seeded_and_right() -> None:
    rows = draw(operands=3, digits=2)
    assert rows == draw(operands=3, digits=2) != draw(operands=3, digits=2, seed=2)
    for row in rows:
        task = row["prompt"].removeprefix("What is ").removesuffix("?")
        assert row["ground_truth"] == evaluate(task)
        assert sum(map(task.count, "+-*")) == 2
        assert all(len(number) == 2 for number in task.translate({43: 32, 45: 32, 42: 32}).split())
        assert row["extra_info"] == {"data_source": "arithmetic", "tools": ["calculator"]}


@pytest.mark.parametrize("config", [{"operators": ""}, {"operators": "+x"}, {"prompt": "What?"}])
def test_invalid_options_of_tasks_are_a_user_error(config) -> None:
    with pytest.raises(UserError, match=r"env\.tools\.arithmetic"):
        draw(**config)


@pytest.mark.parametrize("config", [{"digits": 1}, {"easy": 1.0}, {"easy": 0.5, "prompt": "{}="}])
def test_train_tasks_are_not_in_other_splits(config) -> None:
    train = {row["prompt"] for row in draw(2000, **config)}
    held_out = {row["prompt"] for row in draw(500, "eval", **config)}
    assert train.isdisjoint(held_out)
    assert len(held_out) > 5


def test_easy_tasks_are_sums_below_ten_without_tools() -> None:
    rows = draw(1000, easy=0.5, prompt="{}=")
    easy = [row for row in rows if row["extra_info"]["tools"] == []]
    assert 400 < len(easy) < 600
    assert all(0 < int(row["ground_truth"]) < 10 for row in easy)
    assert all(row["prompt"].endswith("=") for row in rows)


FILES = [
    {"name": "files", "arguments": {"action": "write", "path": "a", "content": "1+1"}},
    {"name": "files", "arguments": {"action": "list"}},
]


async def test_episode_with_calls_is_one_segment_and_reproducible() -> None:
    """Play with the agent `tool_use` and the collector."""
    said = [
        "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in FILES),
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>',
        '<tool_call>{"name": "calculator"}</tool_call>',
        "2",
    ]
    made, seen = make_tokenizer(PRINTABLE), list[list[list[int]]]()
    own = ToolsEnvConfig(tools=["files", "calculator"], reward=RewardConfig(type="same"))
    config = experiment("tools", "tool_use")
    for _ in range(2):
        turns = iter(said)
        client = ScriptedClient(
            lambda _, turns=turns: response([*made.encode(next(turns)), made.eos_token_id])
        )
        collector = Collector(config, client, made)
        part = collector.parts[""]
        collector.parts[""] = part._replace(env=ToolsEnv(config, own))
        await collector.setup()
        episode, _ = await collector.run(lease(prompt="1+1=", ground_truth="2"), 0)
        await collector.close()
        (header,) = episode.headers
        assert (header.reward, header.turns, len(header.segment_lengths)) == (1.0, 4, 1)
        assert header.reward_parts["tool_calls"] == 4.0
        assert header.reward_parts["tool_errors"] == header.reward_parts["malformed_calls"] == 1.0
        seen.append([request.input_ids for request in client.requests])
    assert seen[0] == seen[1], "tools that are deterministic make prompts that are"
    assert made.decode(seen[0][2]).endswith("2")
    assert 'error: "arguments" must be an object' in made.decode(seen[0][3])
