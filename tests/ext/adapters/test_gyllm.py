"""GyLLM environments: requested actors act concurrently and get their messages and rewards."""

from __future__ import annotations

import pytest

from arealite.base.errors import UserError
from tests.ext.games.players import Player, first_rows, make, task

HERE = "tests.fakes.foreign:Sum"


async def play(*answers: list[str], **options: object) -> list[Player]:
    env = make("gyllm", factory=HERE, **{"seats": ["a", "b"]} | options)
    await env.setup()
    seats = [Player(each) for each in answers]
    try:
        await env.run(task(seed=5), **dict(zip(env.seats, seats, strict=True)))
    finally:
        await env.close()
    return seats


async def test_actors_see_the_rules_act_concurrently_and_are_rewarded() -> None:
    first, second = await play(["hi", "3"], ["ho", "4"])
    rules = "Say a number; the higher one wins.\n\ntalk 5"
    assert [player.seen[0].content for player in (first, second)] == [rules, rules]
    assert first.seen[1].content == "the other said ho"
    assert (first.rewards, second.rewards) == ([0.0, 0.0], [0.0, 1.0])


async def test_refused_action_is_requested_again() -> None:
    first, second = await play(["hi", "x", "3"], ["ho", "4", "2"], illegal_reward=-0.25)
    assert first.seen[2].content == "a number, please"
    assert (first.rewards, second.rewards) == ([0.0, -0.25, 1.0], [0.0, -0.25, 0.0])


async def test_episode_ends_after_max_illegal_refused_actions() -> None:
    first, _ = await play(["hi", "x", "y"], ["ho", "4", "2"], max_illegal=2, illegal_reward=-1)
    assert first.rewards == [0.0, -1.0, -1.0]
    assert first.parts == {"illegal": 2.0}


async def test_two_requests_for_one_actor_fail_the_episode() -> None:
    with pytest.raises(Exception, match="it has another request") as raised:
        await play(["hi", "3"], ["ho", "4"], kwargs={"batched": True})
    assert raised.value.failure_class == "bad_requests"  # type: ignore[attr-defined]


async def test_seats_must_be_the_actors() -> None:
    with pytest.raises(UserError, match=r"the environment's actors are \['a', 'b'\]"):
        await make("gyllm", factory=HERE).setup()
    with pytest.raises(UserError, match="gyllm is not installed: pip install gyllm"):
        await make("gyllm", env_id="simple/tic_tac_toe").setup()


def test_rows_without_an_env_id_are_a_user_error() -> None:
    with pytest.raises(UserError, match="env_id is not set"):
        first_rows(make("gyllm"), 1)


async def test_environment_of_make_is_played_by_seats_with_choices_parts_and_rewards() -> None:
    factory = "tests.ext.wrappers.test_wrappers:scaled"
    options = {"factory": factory, "seats": ["x", "o"], "kwargs": {"opening_moves": 0}}
    env = make("gyllm", **options)
    await env.setup()
    x, o = Player(["1", "2", "3"]), Player(["4", "5"])
    try:
        await env.run(task(seed=5), x=x, o=o)
    finally:
        await env.close()
    assert x.seen[1].choices == ("2", "3", "5", "6", "7", "8", "9")
    assert "You are o." in str(o.seen[0])
    assert (x.rewards, x.parts) == ([0.0, 0.0, 0.5], {"win": 1.0, "illegal": 0.0})
    assert (o.rewards, o.parts) == ([0.0, -0.5], {"win": 0.0, "illegal": 0.0})
