"""MiniWoB++'s tasks: rows, observations, rewards and failures."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import pytest_asyncio

from arealite.api.episode import Action
from arealite.api.observation import Observation
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.web import miniwob as module
from arealite.ext.web.browser.actions import RULES
from arealite.ext.web.config import BrowserConfig, BrowserEnvConfig
from arealite.ext.web.miniwob import BrowserEnv, page_path, task_names
from tests.ext.web.browser.sites import needs_chromium

pytestmark = [needs_chromium, pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


class Player:
    """An agent with scripted answers that records its observations and rewards."""

    def __init__(self, answer: Callable[[Observation], str]) -> None:
        self.answer = answer
        self.seen: list[str] = []
        self.reward_total = 0.0
        self.parts: dict[str, float] = {}

    async def act(self, observation: Observation) -> Action:
        self.seen.append(str(observation.content))
        return Action(self.answer(observation))

    def reward(self, value: float, **parts: float) -> None:
        self.reward_total += value
        for name, part in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + part


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env():
    config = BrowserEnvConfig(browser=BrowserConfig(contexts=4, timeout_s=60.0))
    made = BrowserEnv(None, config)
    await made.setup()
    yield made
    await made.close()


async def play(env, name: str, *answers: str | Callable[[Observation], str], seed: int = 3):
    """Play one task, repeating the last answer; return the player."""
    left = list(answers)

    def answer(observation: Observation) -> str:
        each = left.pop(0) if len(left) > 1 else left[0]
        return each if isinstance(each, str) else each(observation)

    player: Any = Player(answer)
    await env.run(
        Task(
            task_id="train-0",
            prompt=name,
            ground_truth=None,
            extra_info={"task": name, "seed": seed},
        ),
        agent=player,
    )
    return player


def number(observation: Observation, words: str) -> str:
    lines = str(observation.content).split("\n")
    return next(line for line in lines if words in line).split("]")[0][1:]


async def test_solved_task_is_rewarded(env) -> None:
    player = await play(env, "click-test", "click [1]")
    assert (player.reward_total, player.parts) == (1.0, {"success": 1.0, "bad_actions": 0.0})
    assert player.seen[0].endswith('Goal: Click the button.\n[1] button "Click Me!"')
    assert RULES["short"] in player.seen[0]
    assert "http" not in player.seen[0]  # each worker has another port


async def test_failed_task_scores_minus_1_and_unfinished_task_0(env) -> None:
    player = await play(env, "click-test-2", lambda o: f"click [{number(o, 'TWO')}]")
    assert (player.reward_total, player.parts) == (-1.0, {"success": 0.0, "bad_actions": 0.0})
    player = await play(env, "click-test-2", "stop")
    assert (player.reward_total, player.parts) == (0.0, {"success": 0.0, "bad_actions": 0.0})


async def test_each_observation_holds_the_goal(env) -> None:
    def fill(observation: Observation) -> str:
        wanted = str(observation.content).split('Goal: Enter "')[1].split('"')[0]
        return f"type [{number(observation, 'textbox')}] [{wanted}]"

    player = await play(env, "enter-text", fill, lambda o: f"click [{number(o, 'button')}]")
    assert player.reward_total == 1.0
    assert len(player.seen) == 2
    assert all("Goal: Enter " in seen for seen in player.seen)
    assert player.seen[1].startswith(RULES["short"])


async def test_bad_actions_are_reported_and_counted_until_max_steps(env) -> None:
    player = await play(
        env, "click-test", "I do not know", "click [77]", "goto [file:///etc/hosts]"
    )
    assert len(player.seen) == env.config.max_steps
    assert player.reward_total == 0.0
    assert player.parts == {"success": 0.0, "bad_actions": 10.0}
    assert "error: that is no action" in player.seen[1]
    assert "error: there is no [77]" in player.seen[2]
    assert "error: file:///etc/hosts is not on a site" in player.seen[3]
    assert "error: that" not in player.seen[2]


async def test_leaving_the_tasks_page_scores_minus_1(env) -> None:
    address = env.address
    for url in (f"{address}/miniwob/click-test.html", "click-test.html", "enter-text.html"):
        player = await play(env, "enter-text", f"goto [{url}]", "click [1]")
        assert (player.reward_total, player.parts) == (-1.0, {"success": 0.0, "bad_actions": 0.0})
        assert len(player.seen) == 1


async def test_equal_seeds_give_equal_pages(env) -> None:
    pages = [(await play(env, "click-button", "stop", seed=seed)).seen[0] for seed in (1, 1, 2)]
    assert pages[0] == pages[1] != pages[2]


async def test_unknown_task_fails_the_episode(env) -> None:
    with pytest.raises(EpisodeError, match="Did you mean 'click-test'"):
        await play(env, "click-tset", "stop")


@pytest.mark.parametrize(("rules", "begins"), [("none", "Goal:"), ("short", "Actions:")])
async def test_rules_may_be_short_or_none(env, rules: str, begins: str, monkeypatch) -> None:
    config = BrowserConfig(rules=rules, max_chars=40, timeout_s=60.0)  # type: ignore[arg-type]
    monkeypatch.setattr(env.browser, "config", config)
    monkeypatch.setattr(env.browser, "_idle", [])
    player = await play(env, "click-button", "scroll [down]", "stop")
    assert all(seen.startswith(begins) for seen in player.seen)
    assert all("cut here" in seen for seen in player.seen)
    assert all(len(seen) < 300 for seen in player.seen)


async def test_every_task_resets_is_described_and_scores(env) -> None:
    """Play all 128 tasks for three steps with random possible actions."""
    names = task_names(["all"])
    assert len(names) == 128
    failed: dict[str, str] = {}

    async def episode(name: str) -> None:
        rng = random.Random(name)

        def answer(observation: Observation) -> str:
            return rng.choice(observation.choices) if observation.choices else "scroll [down]"

        player = await play(env, name, answer, answer, answer, "stop", seed=7)
        first = player.seen[0]
        if not math.isfinite(player.reward_total) or not -1 <= player.reward_total <= 1:
            failed[name] = f"reward {player.reward_total}"
        elif player.parts["bad_actions"] and not name.startswith("flight."):
            # These three pages move by themselves: an element may already be gone.
            failed[name] = f"a choice that cannot be made: {player.seen}"
        elif "Goal: \n" in first or "(an empty page)" in first or "[1]" not in first:
            failed[name] = first

    async with asyncio.timeout(250):
        await asyncio.gather(*(episode(name) for name in names))
    assert failed == {}


def rows(split: str, seed: int = 1, **config: Any) -> list[dict[str, Any]]:
    made = BrowserEnv.rows(BrowserEnvConfig(**config), split=split, seed=seed)
    return list(islice(made, 300))


async def test_rows_are_endless_seeded_and_differ_between_splits() -> None:
    train = rows("train")
    assert train == rows("train")
    assert len({row["prompt"] for row in train[:128]}) == 128
    assert train[0]["extra_info"]["task"] == train[0]["prompt"]
    about = [{row["extra_info"]["seed"] for row in each} for each in (train, rows("eval"))]
    assert not about[0] & about[1]
    assert rows("train", 2) != train
    assert {row["prompt"] for row in rows("train", tasks=["click-test"])} == {"click-test"}


async def test_unknown_task_name_is_a_user_error_before_the_run() -> None:
    with pytest.raises(UserError, match="Did you mean 'click-test'"):
        rows("train", tasks=["click-tset"])


async def test_missing_miniwob_is_a_user_error_with_the_install_command(monkeypatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install -e '.\[browser\]'"):
        rows("train")


async def test_names_are_paths_below_the_folder() -> None:
    assert page_path("click-test") == "miniwob/click-test.html"
    assert page_path("flight.AA") == "flight/AA/wrapper.html"
