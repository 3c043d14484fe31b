"""TextArena's games: a seat a player, each with its own view; the same seed deals the same."""

from __future__ import annotations

import asyncio

import pytest

from arealite.base.errors import UserError
from tests.impl.env.games.players import Player, make, task

pytest.importorskip("textarena", reason="needs the extra envs", exc_type=ImportError)


async def play(env_id: str, *answers: list[str], seed: int = 1, **options: object) -> list[Player]:
    env = make("textarena", env_id=env_id, players=len(answers), **options)
    await env.setup()
    seats = [Player(each) for each in answers]
    await env.run(task(seed=seed), **dict(zip(env.seats, seats, strict=True)))
    await env.close()
    return seats


async def test_a_game_between_two_seats() -> None:
    x, o = await play("TicTacToe-v0", ["[0]", "[1]", "[2]"], ["[3]", "[4]"])
    assert [len(player.rewards) for player in (x, o)] == [3, 2]
    assert (sum(x.rewards), sum(o.rewards)) == (1.0, -1.0)
    for player in (x, o):
        assert "Your goal is to win" in player.seen[0].content, "every seat is told the rules"
        assert "Your goal is to win" not in player.seen[1].content, "only what is new"
    assert "Player 1 placed their symbol" in x.seen[1].content


async def test_an_agent_without_memory_sees_the_whole_game() -> None:
    x, _ = await play("TicTacToe-v0", ["[0]", "[1]", "[2]"], ["[3]", "[4]"], observation="whole")
    assert "Your goal is to win" in x.seen[2].content


async def test_invalid_moves_lose_and_whose_turn_never_came_has_nothing() -> None:
    x, o = await play("TicTacToe-v0", ["[9]", "[9]"], [])
    assert (sum(x.rewards), x.parts, o.rewards) == (-1.0, {"invalid": 1.0}, [])


async def test_games_side_by_side_deal_as_their_seeds_say() -> None:
    """They share the process's random state, and another's draws must not change what is dealt."""

    async def cards(seed: int) -> str:
        seats = await play("KuhnPoker-v0", ["x"] * 2, ["x"] * 2, seed=seed)
        return "|".join(seat.seen[0].content for seat in seats if seat.seen)

    alone = [await cards(seed) for seed in range(6)]
    together = await asyncio.gather(*(cards(seed) for seed in range(6)))
    assert together == alone
    assert len({*alone}) > 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"env_id": "Chess-v99"}, "Chess-v99 with players=2 cannot be made.*not found"),
        ({"env_id": "TicTacToe-v0", "players": 5}, "players=5 cannot be made"),
        ({}, "env_id is not set"),
    ],
)
async def test_what_cannot_be_made_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        await make("textarena", **options).setup()
