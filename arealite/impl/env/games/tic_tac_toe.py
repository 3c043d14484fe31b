"""Tic-tac-toe between two seats, for self-play or against a scripted agent.

Each observation holds the rules and the board, so agents need no memory.
"""

import random
from collections.abc import Iterator
from itertools import count

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.game_config import TicTacToeConfig
from arealite.api.observation import Observation
from arealite.api.task import Row, Task
from arealite.base.errors import UserError
from arealite.impl.env.games.choices import chosen
from arealite.impl.env.prompts import PROMPTS

SQUARES = tuple("123456789")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
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
            moves = rng.sample(SQUARES, rng.randint(0, config.opening_moves))
            yield {"prompt": "tic-tac-toe", "extra_info": {"opening": "".join(moves)}}

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play a game that starts with the moves of the task's `extra_info.opening`, as "159".

        Raises:
            UserError: The opening is invalid.
        """
        opening = str(task.extra_info.get("opening", ""))
        if len(opening) > 4 or len({*SQUARES} & {*opening}) != len(opening):
            hint = "Write up to four different squares, as '159'."
            raise UserError(f"{task.task_id}: extra_info.opening='{opening}'. {hint}")
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
                action = await agents[seat].act(Observation(self.show(board, seat), free))
                moved.add(seat)
                move = chosen(action.text, SQUARES)
                if move not in free:
                    winner = other
                    illegal = seat
                    break
            board[int(move) - 1] = seat
            if any(board[a] == board[b] == board[c] for a, b, c in LINES):
                winner = seat
                break
        for seat in moved:
            value = self.config.draw_reward
            if winner:
                value = self.config.win_reward if seat == winner else self.config.loss_reward
            if seat == illegal:
                value = self.config.illegal_reward
            agents[seat].reward(value, win=float(seat == winner), illegal=float(seat == illegal))

    def show(self, board: list[str], seat: str) -> str:
        """Return a seat's observation before its move."""
        rows = "\n".join(" ".join(board[i : i + 3]) for i in (0, 3, 6))
        return f"{(self.config.rules or RULES).replace('{seat}', seat)}\n{rows}\n"
