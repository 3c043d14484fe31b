"""Reversed texts: partial credit, several turns."""

from __future__ import annotations

import pytest

from arealite.base.errors import UserError
from tests.ext.games.players import Player, first_rows, make, task


@pytest.mark.parametrize(
    ("answer", "score"),
    [("cba", 1), ("cbx", 2 / 3), ("c", 1 / 3), ("", 0), (" cba\n", 1), ("cbabab", 0.5)],
)
@pytest.mark.parametrize("partial_credit", [True, False])
async def test_reward_is_the_share_of_letters_in_place(answer, score, partial_credit) -> None:
    seat = Player([answer])
    await make("reverse", partial_credit=partial_credit).run(task("abc"), agent=seat)
    assert seat.rewards == [score if partial_credit or score == 1 else 0]
    assert seat.parts == {"exact": float(score == 1)}
    assert seat.seen[0].content.endswith(": abc")


async def test_last_message_of_a_prompt_is_the_text() -> None:
    seat = Player(["cba"])
    await make("reverse").run(task([{"role": "user", "content": "abc"}]), agent=seat)
    assert seat.rewards == [1.0]


async def test_each_turn_asks_to_reverse_or_to_echo() -> None:
    seat = Player(["cba", "def", "gxi"])
    await make("reverse_echo").run(task("reverse abc\necho def\necho ghi"), agent=seat)
    assert seat.rewards == pytest.approx([1 / 3, 1 / 3, 2 / 9])
    assert seat.parts == {"exact": pytest.approx(2 / 3)}
    assert "backwards" in seat.seen[0].content
    assert "Repeat" in seat.seen[1].content


@pytest.mark.parametrize("prompt", ["abc", "reverse", "reverse abc\nsing def"])
async def test_invalid_line_is_a_user_error(prompt: str) -> None:
    with pytest.raises(UserError, match="prompt"):
        await make("reverse_echo").run(task(prompt), agent=Player([]))


@pytest.mark.parametrize("kind", ["reverse", "reverse_echo"])
async def test_rows_are_seeded_and_can_be_played(kind: str) -> None:
    env = make(kind, length=7)
    rows = first_rows(env, 50)
    assert rows == first_rows(env, 50)
    assert rows != first_rows(env, 50, split="eval")
    assert len({row["prompt"] for row in rows}) == 50

    def solve(seen) -> str:
        text = seen.content.rpartition(": ")[2]
        assert len(text) == 7
        return text[::-1] if "backwards" in seen.content else text

    for row in rows:
        seat = Player(solve)
        await env.run(task(row["prompt"]), agent=seat)
        assert sum(seat.rewards) == pytest.approx(1.0)
