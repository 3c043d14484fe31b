"""TextArena's games: one seat per player with its own view; equal seeds give equal games."""

from __future__ import annotations

import asyncio

import pytest

from arealite.base.errors import UserError
from tests.ext.games.players import Player, make, task

pytest.importorskip("textarena", reason="needs the extra envs", exc_type=ImportError)


async def play(env_id: str, *answers: list[str], seed: int = 1, **options: object) -> list[Player]:
    env = make("textarena", env_id=env_id, players=len(answers), **options)
    await env.setup()
    seats = [Player(each) for each in answers]
    await env.run(task(seed=seed), **dict(zip(env.seats, seats, strict=True)))
    await env.close()
    return seats


async def test_two_seats_play_a_game() -> None:
    x, o = await play("TicTacToe-v0", ["[0]", "[1]", "[2]"], ["[3]", "[4]"])
    assert [len(player.rewards) for player in (x, o)] == [3, 2]
    assert (sum(x.rewards), sum(o.rewards)) == (1.0, -1.0)
    for player in (x, o):
        assert "Your goal is to win" in player.seen[0].content, "every seat is told the rules"
        assert "Your goal is to win" not in player.seen[1].content, "only what is new"
    assert "Player 1 placed their symbol" in x.seen[1].content


async def test_observation_whole_shows_the_whole_game() -> None:
    x, _ = await play("TicTacToe-v0", ["[0]", "[1]", "[2]"], ["[3]", "[4]"], observation="whole")
    assert "Your goal is to win" in x.seen[2].content


async def test_invalid_move_loses_and_a_player_without_a_turn_gets_no_reward() -> None:
    x, o = await play("TicTacToe-v0", ["[9]", "[9]"], [])
    assert (sum(x.rewards), x.parts, o.rewards) == (-1.0, {"invalid": 1.0}, [])


async def test_concurrent_games_depend_only_on_their_seeds() -> None:
    """Games share the global random state; draws of one game must not affect another."""

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
        ({"env_id": "Chess-v99"}, "Chess-v99 with players=2 cannot be constructed.*not found"),
        ({"env_id": "TicTacToe-v0", "players": 5}, "players=5 cannot be constructed"),
        ({}, "env_id is not set"),
    ],
)
async def test_invalid_config_is_a_user_error(options: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        await make("textarena", **options).setup()
