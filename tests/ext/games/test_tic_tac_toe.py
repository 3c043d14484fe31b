"""Tic-tac-toe: wins, draws, illegal moves, observations."""

from __future__ import annotations

import pytest

from arealite.base.errors import UserError
from tests.ext.games.players import Player, first_rows, make, task


async def play(x: str, o: str, *, opening: str = "", **options: object) -> tuple[Player, Player]:
    seats = Player(x), Player(o)
    env = make("tic_tac_toe", draw_reward=0.25, loss_reward=-0.5, **options)
    await env.run(task(opening=opening), x=seats[0], o=seats[1])
    return seats


@pytest.mark.parametrize("line", ["123", "456", "789", "147", "258", "369", "159", "357"])
async def test_three_in_a_line_win_the_game(line: str) -> None:
    free = [square for square in "123456789" if square not in line]
    x, o = await play(line, "".join(free[:2]))
    assert (x.rewards, o.rewards) == ([0.0, 0.0, 1.0], [0.0, -0.5])
    assert (x.parts, o.parts) == ({"win": 1, "illegal": 0}, {"win": 0, "illegal": 0})


async def test_o_wins_too() -> None:
    x, o = await play("127", "456")
    assert (sum(x.rewards), sum(o.rewards)) == (-0.5, 1.0)
    assert o.parts["win"] == 1


async def test_full_board_is_a_draw() -> None:
    x, o = await play("13849", "2567")
    assert (sum(x.rewards), sum(o.rewards)) == (0.25, 0.25)
    assert x.parts == o.parts == {"win": 0, "illegal": 0}
    assert len(x.rewards) + len(o.rewards) == 9


@pytest.mark.parametrize("move", ["1", "0", "10", "", "the middle", "x"])
async def test_illegal_move_loses(move: str) -> None:
    seats = Player("1"), Player([move])
    await make("tic_tac_toe", illegal_reward=-2.0).run(task(), x=seats[0], o=seats[1])
    assert [seat.rewards for seat in seats] == [[1.0], [-2.0]]
    assert seats[1].parts == {"win": 0, "illegal": 1}
    assert seats[0].parts == {"win": 1, "illegal": 0}


async def test_seat_that_never_moved_gets_no_reward() -> None:
    x, o = await play("?", "")
    assert (x.rewards, o.rewards, o.parts) == ([-1.0], [], {})


async def test_seats_see_rules_board_and_choices() -> None:
    x, o = await play("13849", "2567")
    for seat, name in ((x, "x"), (o, "o")):
        for seen in seat.seen:
            assert "three" in seen.content
            assert f"You are {name}." in seen.content
    assert x.seen[1].content.endswith("\nx o 3\n4 5 6\n7 8 9\n")
    assert x.seen[1].choices == tuple("3456789")
    assert o.seen[-1].content.endswith("\nx o x\nx o o\n7 x 9\n")


async def test_rules_are_configurable() -> None:
    x, _ = await play("123", "45", rules="{seat}: {board}")
    assert x.seen[0].content == "x: {board}\n1 2 3\n4 5 6\n7 8 9\n"


async def test_task_sets_the_opening() -> None:
    x, o = await play("37", "96", opening="125")
    assert o.seen[0].content.endswith("\nx o 3\n4 x 6\n7 8 9\n")
    assert (x.rewards, o.rewards) == ([0.0, 1.0], [0.0, -0.5])
    for opening in ("11", "12345", "a"):
        with pytest.raises(UserError, match="opening"):
            await play("1", "2", opening=opening)


def test_openings_are_seeded_and_differ_between_splits() -> None:
    env = make("tic_tac_toe", opening_moves=4)
    rows = first_rows(env, 200)
    assert rows == first_rows(env, 200)
    assert rows != first_rows(env, 200, seed=2)
    assert rows != first_rows(env, 200, split="eval")
    openings = [row["extra_info"]["opening"] for row in rows]
    assert {len(opening) for opening in openings} == {0, 1, 2, 3, 4}
    assert all(len({*opening}) == len(opening) for opening in openings)
    assert {row["extra_info"]["opening"] for row in first_rows(make("tic_tac_toe"), 9)} == {""}
