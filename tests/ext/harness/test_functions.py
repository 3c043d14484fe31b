"""A function plays episodes with a real HTTP client, and its result is the reward."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from arealite.api.reward import RewardConfig
from arealite.base.errors import ServerUnavailable, UserError
from arealite.ext.harness.env import HarnessEnv
from arealite.ext.rewards.config import FunctionRewardConfig
from arealite.impl.rollout.collector import Collector
from tests.ext.harness.harnesses import answer, collecting, configured, failed, play, rewarded
from tests.fakes.client import ScriptedClient
from tests.fakes.experiment import lease, tokenizer


async def test_reward_of_a_function_belongs_to_its_sampled_turn() -> None:
    for text, reward in (("2", 1.0), ("3", 0.0)):
        (header,) = (await play(answer(text), run="number")).headers
        assert (header.reward, header.turns, header.trained_tokens) == (reward, 1, 2)


@pytest.mark.parametrize("name", ["blocking", "blocking_the_loop"])
async def test_function_that_blocks_gets_its_answers(name: str) -> None:
    async with collecting(run=name) as made:  # in the worker's loop it would block the gateway
        done = await asyncio.gather(*(made.run(lease(n), 0) for n in range(4)))
    assert [episode.headers[0].reward for episode, _ in done] == [0.5] * 4


@pytest.mark.parametrize(
    ("result", "reward", "parts"),
    [
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        ({"right": 1, "short": 0.25}, 1.25, {"right": 1.0, "short": 0.25}),
        ({"reward": 3.0, "right": 1}, 3.0, {"right": 1.0}),
        ({"value": 1.0, "self": 2.0}, 3.0, {"value": 1.0, "self": 2.0}),
        ("2", 1.0, {}),  # exact_match scores a text
        ("3", 0.0, {}),
        (None, 1.0, {}),  # exact_match scores the last answer
    ],
)
async def test_result_is_a_number_or_parts_or_an_answer_to_score(
    result: Any, reward: float, parts: dict[str, float]
) -> None:
    (header,) = (await play(run="row", columns={"result": result})).headers
    assert rewarded(header) == (reward, parts)


@pytest.mark.parametrize("result", [(1.0, {}), {"right": "yes"}, [1.0]])
async def test_result_that_is_no_reward_fails_the_episode(result: Any) -> None:
    detail = await failed("harness_failed", run="row", columns={"result": result})
    assert "must give a number, or a dict of numbers" in detail


@pytest.mark.parametrize(
    ("name", "words"),
    [("raising", "IndexError"), ("leaving", "SystemExit: 3"), ("two_errors", "IndexError")],
)
async def test_failing_function_is_reported_with_its_own_line(name: str, words: str) -> None:
    detail = await failed("harness_failed", run=name)
    assert words in detail and re.search(r"agents\.py:\d+\)", detail)


async def test_failures_of_two_lines_are_both_logged(capsys: pytest.CaptureFixture[str]) -> None:
    async with collecting(run="refusing") as made:
        for number in range(6):
            work = lease(number)
            columns = {"first": number % 2}
            task = structs.replace(work.task, columns=columns)
            await made.run(structs.replace(work, task=task), 0)
    assert capsys.readouterr().out.count("episode failed") == 2


async def test_function_without_a_request_fails_the_episode() -> None:
    assert "made no request" in await failed("harness_failed", run="silent")


async def test_row_without_truth_and_reward_names_the_fix() -> None:
    detail = await failed("harness_failed", run="row", truth=None, columns={"result": None})
    assert "Return a reward, or set env.harness.reward.type" in detail


async def test_error_of_the_servers_is_not_the_agents() -> None:
    def script(_: object) -> Exception:
        return ServerUnavailable("no server")

    assert "no server" in await failed("server_unavailable", script, run="number")


async def test_seats_get_their_own_rewards() -> None:
    episode = await play(run="duel", seats=["x", "o"])
    rewards = {header.seat: rewarded(header) for header in episode.headers}
    assert rewards == {"x": (1.0, {}), "o": (-1.0, {"lost": 1.0})}


@pytest.mark.parametrize(
    "result", [{"x": 1.0, "oo": 0.0}, {"xx": {"reward": 1.0}, "o": 1.0}, {"oo": {"right": 1.0}}]
)
async def test_reward_of_an_unknown_seat_fails_the_episode(result: dict[str, Any]) -> None:
    detail = await failed("harness_failed", run="row", seats=["x", "o"], columns={"result": result})
    assert "Unknown seat" in detail and "Known: x, o." in detail


async def test_seat_that_did_not_ask_has_no_trajectory() -> None:
    (header,) = (await play(run="alone", seats=["x", "o"])).headers
    assert (header.seat, header.reward) == ("o", 2.0)


async def test_answer_that_the_reward_function_leaves_unscored_has_no_score(tmp_path: Path) -> None:
    file = tmp_path / "my_unscored_reward.py"
    file.write_text("def f(completion): return None if completion == '2' else 1.0")
    paths = [f"{file}:f"]
    reward = RewardConfig(type="function", function=FunctionRewardConfig(paths=paths))
    (header,) = (await play(run="row", columns={"result": None}, reward=reward)).headers
    assert header.reward is None


async def test_posted_reward_wins_over_the_reward_function() -> None:
    (header,) = (await play(answer("3"), run="posting")).headers
    assert rewarded(header) == (0.25, {"style": 2.0})


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [("number", "posted", "posted"), ("posting", "return", "return")],
)
async def test_reward_from_another_source_is_refused(name: str, source: str, words: str) -> None:
    detail = await failed("harness_failed", run=name, reward_from=source)
    assert f"reward_from={words}: the agent gave no reward that way" in detail


async def test_exit_in_a_task_of_an_agent_fails_only_its_episode() -> None:
    async with collecting(run="task_leaves") as made:
        for number in range(2):
            episode, _ = await made.run(lease(number), 0)
            assert episode.failure is not None and "SystemExit: 3" in episode.failure.detail


async def test_cancelled_episode_ends_its_session_and_its_agent() -> None:
    async with collecting(run="waiting") as made:
        playing = asyncio.create_task(made.run(lease(), 0))
        agents = sys.modules["agents"]
        assert await asyncio.to_thread(agents.began.wait, 30)
        (wait,) = made._running
        wait.expire()
        episode, _ = await playing
        assert await asyncio.to_thread(agents.cancelled.wait, 30)
        assert episode.failure is not None
        assert episode.failure.failure_class == "episode_timeout"
        env = made.parts[""].env
        assert isinstance(env, HarnessEnv) and not env.gateway.sessions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "sets no way to run an agent. Set exactly one of run, command and pull"),
        ({"run": "number", "command": ["true"]}, "sets run and command. Set exactly one"),
        ({"run": "generating"}, "is a generator. Return the reward, do not yield it."),
        ({"run": "nmber"}, "Unknown function 'nmber'"),
        ({"run": "one_parameter"}, "Write def solve(task, endpoint)."),
        ({"run": "nowhere.py:solve"}, "env.harness.run=nowhere.py:solve: no module of that name"),
        (
            {"command": ["no-such-program"]},
            "program no-such-program is not installed. Install",
        ),
        ({"run": "number", "reward_from": "file"}, "reward_from=file needs command"),
        ({"run": "number", "seats": ["a", "a"]}, "Give each seat a name of its own"),
        ({"run": "number", "seats": ["task"]}, "Give each seat a name of its own"),
        ({"run": "number", "sandbox": True}, "sandbox=true needs a `command`"),
        ({"pull": True}, "pull=true needs gateway.token_env"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: Any, words: str) -> None:
    with pytest.raises(UserError) as refused:
        Collector(configured(**options), ScriptedClient(), tokenizer())
    assert words in str(refused.value) and "\n" not in str(refused.value)
