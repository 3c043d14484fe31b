"""Gymnasium environments: actions by name, faults, and instances that are reused or closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from arealite.base.errors import RewardNotFinite, UserError
from arealite.ext.adapters.blocking import Instance
from arealite.ext.adapters.config import GymnasiumConfig
from arealite.ext.adapters.gymnasium import GymnasiumEnv, actions
from tests.ext.games.players import Player, first_rows, make, task
from tests.fakes import foreign
from tests.fakes.foreign import Discrete, Guess
from tests.waiting import eventually

HERE = "tests.fakes.foreign:Guess"


@pytest.fixture
async def opened(request: pytest.FixtureRequest):
    Guess.made.clear()
    foreign.RELEASE.clear()
    env = make("gymnasium", factory=HERE, **getattr(request, "param", {}))
    await env.setup()
    yield env
    foreign.RELEASE.set()
    await env.close()


def wanted(seed: int) -> str:
    guess = Guess()
    guess.reset(seed=seed)
    Guess.made.remove(guess)
    return str(guess.wanted)


async def test_right_number_ends_the_episode(opened: GymnasiumEnv) -> None:
    right = wanted(7)
    wrong = next(number for number in "123" if number != right)
    player = Player([f"I say {wrong}.", f"then {right}"])
    await opened.run(task("Guess.", seed=7), agent=player)
    assert player.rewards == [0.0, 1.0]
    assert player.seen[0].content == "Guess. Answer with one of: 1, 2, 3.\nhint: 1 to 3"
    assert player.seen[0].choices == ("1", "2", "3")
    assert player.seen[1].content == f"not {wrong}"


@pytest.mark.parametrize(
    "opened", [{"illegal_reward": -0.5, "max_illegal": 2, "repeat_rules": True}], indirect=True
)
async def test_invalid_actions_are_reported_and_end_the_episode_at_max_illegal(
    opened: GymnasiumEnv,
) -> None:
    player = Player(["four", "5"])
    await opened.run(task("Guess.", seed=1), agent=player)
    assert player.rewards == [-0.5, -0.5]
    assert player.parts == {"illegal": 2.0}
    assert player.seen[1].content.startswith("Guess.")
    assert "That is no action. Answer with one of: 1, 2, 3." in player.seen[1].content


async def test_instances_are_reused_and_closed_at_the_end(opened: GymnasiumEnv) -> None:
    for seed in range(4):
        await opened.run(task(seed=seed), agent=Player(lambda _: wanted(seed)))  # noqa: B023
    assert len(Guess.made) == 1
    assert Guess.made[0].resets == 4
    turns = [opened.run(task(seed=1), agent=Player(["no"] * 3)) for _ in range(5)]
    await asyncio.gather(*turns)
    await opened.close()
    assert all(guess.is_closed for guess in Guess.made)


@pytest.mark.parametrize("opened", [{"kwargs": {"text": True}}], indirect=True)
async def test_without_numbered_actions_the_text_is_the_action(opened: GymnasiumEnv) -> None:
    player = Player(["hello", wanted(3)])
    await opened.run(task("Say.", seed=3), agent=player)
    assert player.seen[0].content == "Say.\nhint: 1 to 3"
    assert player.seen[1].content == "not hello"


@pytest.mark.parametrize(
    ("opened", "error"),
    [
        ({"kwargs": {"fault": "raise"}}, KeyError),
        ({"kwargs": {"fault": "nan"}}, RewardNotFinite),
    ],
    indirect=["opened"],
)
async def test_faulty_instance_is_not_reused(opened: GymnasiumEnv, error: type[Exception]) -> None:
    with pytest.raises(error):
        await opened.run(task(seed=1), agent=Player(["1"]))
    await eventually(lambda: Guess.made[0].is_closed)
    with pytest.raises(error):
        await opened.run(task(seed=1), agent=Player(["1"]))
    assert len(Guess.made) == 2


@pytest.mark.parametrize("opened", [{"kwargs": {"fault": "hang"}, "threads": 2}], indirect=True)
async def test_hanging_step_occupies_only_its_thread(opened: GymnasiumEnv) -> None:
    free = opened.threads._free
    for left in (1, 0):
        player = Player(["1"])
        running = asyncio.ensure_future(opened.run(task(seed=1), agent=player))
        await eventually(lambda: player.seen and free._value == left)  # noqa: B023
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    with pytest.raises(Exception, match="all 2 threads hang") as raised:
        await opened.run(task(seed=1), agent=Player(["1"]))
    assert raised.value.failure_class == "env_stuck"  # type: ignore[attr-defined]
    opened._idle.append(Instance(Guess(), opened.threads))
    await opened.close()
    foreign.RELEASE.set()
    await eventually(lambda: all(guess.is_closed for guess in Guess.made))
    Guess.made.clear()
    await eventually(lambda: not opened.threads._abandoned)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "set env_id, or factory"),
        ({"factory": "tests.fakes.foreign:Nothing"}, "Unknown function 'Nothing'"),
        ({"factory": "nowhere"}, "Write module:name"),
        ({"factory": HERE, "kwargs": {"fault": "make"}}, "cannot be constructed: no display"),
        ({"factory": HERE, "actions": ["left", "right"]}, "has 2 names, but the environment has 3"),
    ],
)
async def test_invalid_config_is_a_user_error(options: dict[str, Any], says: str) -> None:
    env = make("gymnasium", **options)
    with pytest.raises(UserError, match=says):
        await env.setup()
    await env.close()


async def test_task_without_a_seed_is_a_user_error(opened: GymnasiumEnv) -> None:
    with pytest.raises(UserError, match=r"extra_info\.seed"):
        await opened.run(task(), agent=Player(["1"]))


def test_actions_have_names_or_numbers_else_a_user_error() -> None:
    assert actions(Discrete(2), ["left", "right"]) == (0, ("left", "right"))
    with pytest.raises(UserError, match="texts and numbers"):
        actions(object(), [])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"env_id": "FrozenLake-v1"}, "FrozenLake-v1"),
        ({"factory": "my.lake:Lake"}, "Lake"),
        ({"factory": "my.lake:make"}, "lake"),
        ({"factory": "gymnasium:make", "kwargs": {"id": "CartPole-v1"}}, "CartPole-v1"),
    ],
)
def test_prompt_has_the_name_of_the_game(options: dict[str, Any], name: str) -> None:
    row = next(GymnasiumEnv.rows(GymnasiumConfig(**options), split="train", seed=1))
    assert row["prompt"] == f"You act in {name}."


def test_rows_are_seeded_and_differ_between_splits() -> None:
    env = make("gymnasium", factory=HERE)
    train, again = (first_rows(env, 20) for _ in range(2))
    held_out = first_rows(env, 20, split="eval")
    seeds = [[row["extra_info"]["seed"] for row in rows] for rows in (train, held_out)]
    assert train == again
    assert len({*seeds[0], *seeds[1]}) == 40


async def test_frozen_lake_is_solved() -> None:
    pytest.importorskip("gymnasium", reason="needs the extra envs", exc_type=ImportError)
    kwargs = {"is_slippery": False, "render_mode": "ansi"}
    env = make(
        "gymnasium",
        env_id="FrozenLake-v1",
        kwargs=kwargs,
        actions=["left", "down", "right", "up"],
    )
    await env.setup()
    way = Player(["down", "down", "right", "right", "down", "right"])
    await env.run(task("Reach G.", seed=1), agent=way)
    await env.close()
    assert way.rewards == [0.0] * 5 + [1.0]
    first = way.seen[0].content.splitlines()
    assert first[1] == "[S]FFF"
    assert way.seen[1].content.splitlines()[-4:-2] == ["SFFF", "[F]HFH"]
