"""Matrix games: payoffs, unreadable choices, history, configured games."""

from __future__ import annotations

import asyncio

import pytest

from arealite.base.errors import UserError
from arealite.ext.games.matrix_game import GAMES
from tests.ext.games.players import Player, first_rows, make, task

OWN = {"up left": [1, 2], "up right": [3, 4], "down left": [5, 6], "down right": [7, 9]}


async def play(row, column, *, kind: str = "matrix_game", **options: object):
    seats = Player(row), Player(column)
    await make(kind, **options).run(task(), row=seats[0], column=seats[1])
    return seats


@pytest.mark.parametrize("game", GAMES)
async def test_each_pair_of_choices_has_its_payoff(game: str) -> None:
    for pair, pays in GAMES[game].items():
        first, second = pair.split()
        row, column = await play([first], [f"I choose {second.upper()}."], game=game)
        assert [row.rewards, column.rewards] == [[pays[0]], [pays[1]]]
        assert row.parts[f"chose_{first}"] == 1
        assert sum(row.parts.values()) == 1


async def test_unreadable_choice_costs_and_does_not_affect_the_other_seat() -> None:
    row, column = await play(["dunno"], ["right"], payoffs=OWN, illegal_reward=-3.0)
    assert (row.rewards, column.rewards) == ([-3.0], [(4 + 9) / 2])
    assert row.parts == {"illegal": 1, "chose_up": 0, "chose_down": 0}
    row, column = await play(["down"], ["down"], payoffs=OWN)
    assert (row.rewards, column.rewards) == ([6.0], [-1.0])
    row, column = await play([""], [""], payoffs=OWN)
    assert (row.rewards, column.rewards) == ([-1.0], [-1.0])


async def test_choices_are_made_at_the_same_time() -> None:
    env, both = make("matrix_game"), asyncio.Barrier(2)

    class Waiting(Player):
        async def act(self, observation):
            await both.wait()
            return await super().act(observation)

    seats = Waiting(["defect"]), Waiting(["cooperate"])
    async with asyncio.timeout(60):
        await env.run(task(), row=seats[0], column=seats[1])
    assert [seat.rewards for seat in seats] == [[5.0], [0.0]]


async def test_seats_see_rules_choices_and_their_own_payoffs() -> None:
    row, column = await play(["up"], ["left"], payoffs=OWN)
    assert "you down, the other right: you get 7, the other 9" in row.seen[0].content
    assert "you right, the other down: you get 9, the other 7" in column.seen[0].content
    assert (row.seen[0].choices, column.seen[0].choices) == (("up", "down"), ("left", "right"))
    assert "up, down" in row.seen[0].content


async def test_iterated_game_shows_all_earlier_rounds() -> None:
    kind = "iterated_prisoners_dilemma"
    row, column = await play(
        ["cooperate", "defect", "?", "defect"],
        ["cooperate"] * 2 + ["defect"] * 2,
        kind=kind,
        rounds=4,
    )
    assert row.rewards == pytest.approx([3 / 4, 5 / 4, -1 / 4, 1 / 4])
    assert column.rewards == pytest.approx([3 / 4, 0, (5 + 1) / 2 / 4, 1 / 4])
    assert row.parts == {"illegal": 1, "chose_cooperate": 0.25, "chose_defect": 0.5}
    assert "Round 1:" not in row.seen[0].content
    last = column.seen[3].content
    assert "Round 2: you: cooperate, the other: defect. You got 0." in last
    assert "Round 3: you: defect, the other: unreadable. You got 3." in last
    assert last.endswith("Round 4 of 4.\n")
    assert all("4 times" in seen.content for seen in row.seen + column.seen)


async def test_configured_payoffs_may_be_iterated() -> None:
    kind = "iterated_prisoners_dilemma"
    row, _ = await play(["up"] * 2, ["right"] * 2, kind=kind, rounds=2, payoffs=OWN)
    assert row.rewards == [1.5, 1.5]


@pytest.mark.parametrize(
    "options",
    [
        {"game": "prisoner"},
        {"payoffs": {"up": [1, 2]}},
        {"payoffs": {"up left": [1]}},
        {"payoffs": {key: OWN[key] for key in ("up left", "down right")}},
    ],
)
def test_invalid_game_is_a_user_error(options) -> None:
    with pytest.raises(UserError):
        make("matrix_game", **options)


def test_rows_name_the_game() -> None:
    assert [row["prompt"] for row in first_rows(make("matrix_game"), 2)] == [
        "prisoners_dilemma"
    ] * 2
