"""Tic-tac-toe between two seats, for self-play or against a scripted agent.

Each observation holds the rules and the board, so agents need no memory.
"""

import random
from collections.abc import Iterator
from itertools import count

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.observation import Observation
from arealite.api.task import Row, Task
from arealite.base.errors import UserError
from arealite.ext.games.choices import chosen
from arealite.ext.games.config import TicTacToeConfig
from arealite.ext.games.prompt_texts import PROMPTS

SQUARES = tuple("123456789")
LINES = (
    (0, 1, 2),
    (3, 4, 5),
    (6, 7, 8),
    (0, 3, 6),
    (1, 4, 7),
    (2, 5, 8),
    (0, 4, 8),
    (2, 4, 6),
)
"""Indices of the squares in each row, column and diagonal."""
RULES = PROMPTS["tic_tac_toe"]["rules"]


class TicTacToeEnv(Env):
    """Tic-tac-toe between the seats x and o; x begins."""

    seats = ("x", "o")
    resumable = True

    @classmethod
    def rows(cls, config: TicTacToeConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield random openings of up to `opening_moves` moves."""
        for number in count():
            rng = random.Random(f"tic-tac-toe/{split}/{seed}/{number}")
            num_moves = rng.randint(0, config.opening_moves)
            opening = "".join(rng.sample(SQUARES, num_moves))
            yield {
                "prompt": "tic-tac-toe",
                "extra_info": {"opening": opening},
            }

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play a game that starts with the moves of the task's `extra_info.opening`, as "159".

        Raises:
            UserError: The opening is invalid.
        """
        opening = str(task.extra_info.get("opening", ""))
        squares = set(opening) & set(SQUARES)
        if len(opening) > 4 or len(squares) != len(opening):
            raise UserError(
                f"{task.task_id}: extra_info.opening='{opening}'. "
                "Write up to four different squares, as '159'."
            )
        board = list(SQUARES)
        moved = set[str]()
        winner = ""
        illegal = ""
        for number in range(9):
            seat = "xo"[number % 2]
            other = "ox"[number % 2]
            move = opening[number : number + 1]
            if not move:
                free = tuple(square for square in board if square in SQUARES)
                observation = Observation(self.show(board, seat), free)
                action = await agents[seat].act(observation)
                moved.add(seat)
                move = chosen(action.text, SQUARES)
                if move not in free:
                    winner = other
                    illegal = seat
                    break
            board[int(move) - 1] = seat
            if has_full_line(board):
                winner = seat
                break
        for seat in moved:
            agents[seat].reward(
                self._value(seat, winner, illegal),
                win=float(seat == winner),
                illegal=float(seat == illegal),
            )

    def _value(self, seat: str, winner: str, illegal: str) -> float:
        """Return the reward of a seat; `winner` and `illegal` are seats, or "" for none."""
        if seat == illegal:
            return self.config.illegal_reward
        if not winner:
            return self.config.draw_reward
        if seat == winner:
            return self.config.win_reward
        return self.config.loss_reward

    def show(self, board: list[str], seat: str) -> str:
        """Return a seat's observation before its move."""
        template = self.config.rules or RULES
        rules = template.replace("{seat}", seat)
        lines = [
            rules,
            " ".join(board[:3]),
            " ".join(board[3:6]),
            " ".join(board[6:]),
            "",
        ]
        return "\n".join(lines)


def has_full_line(board: list[str]) -> bool:
    """Return whether three squares of a row, column or diagonal are equal."""
    return any(board[a] == board[b] == board[c] for a, b, c in LINES)
