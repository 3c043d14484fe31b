"""Train a tiny model in tic-tac-toe by self-play: `make learn LESSON=tic_tac_toe`.

The warm-up shows random moves on random boards, some on squares that are taken. The model learns
good moves from the rewards. Evaluations are against a random opponent, as x and as o.
"""

from __future__ import annotations

import random

from arealite.ext.demo.tiny_model import TinyModel
from arealite.ext.games.config import TicTacToeConfig
from arealite.ext.games.tic_tac_toe import SQUARES, TicTacToeEnv
from tools.lesson import Example, Lesson

GAME = TicTacToeEnv(None, TicTacToeConfig(rules="{seat}"))
PART = "trainer.ppo.collector.envs"
LEGAL = 0.6
"""Share of demonstrated moves on a free square. The other moves are on a random square."""


def examples(rng: random.Random) -> Example:
    """Draw a board and a move."""
    board, played = list(SQUARES), rng.randrange(9)
    for number, square in enumerate(rng.sample(range(9), played)):
        board[square] = "xo"[number % 2]
    free = [square for square in board if square in SQUARES]
    return GAME.show(board, "xo"[played % 2]), rng.choice(free if rng.random() < LEGAL else SQUARES)


def against(part: str, seat: str) -> list[str]:
    """Return the options of evaluation `part`, in which a random opponent has `seat`."""
    env = f"{PART}.{part}.env"
    return [
        f"{env}.type=tic_tac_toe",
        f'{env}.tic_tac_toe.rules="{{seat}}"',
        *(f"{env}.tic_tac_toe.{what}_reward=0" for what in ("draw", "loss", "illegal")),
        f"{PART}.{part}.seats.{seat}.type=scripted",
        f"{PART}.{part}.seats.{seat}.scripted.policy=random",
        f"{PART}.{part}.weight=0.01",
        f"{PART}.{part}.eval=generated",
    ]


LESSON = Lesson(
    about="a tiny model learns tic-tac-toe from itself (won against chance, as x and as o)",
    shape=TinyModel(hidden=64, layers=2, alphabet="xo123456789 \n", context=64),
    examples=examples,
    warm_up=0.16,
    overrides=[
        f"{PART}.self.env.type=tic_tac_toe",
        f'{PART}.self.env.tic_tac_toe.rules="{{seat}}"',
        f"{PART}.self.env.tic_tac_toe.opening_moves=4",
        f"{PART}.self.env.tic_tac_toe.draw_reward=0",
        *against("as_x", "o"),
        *against("as_o", "x"),
        "dataset.eval_rows=256",
        "trainer.ppo.collector.sampling.max_new_tokens=2",
        "trainer.ppo.eval.sampling.max_new_tokens=2",
        "trainer.ppo.eval.every_steps=10",
        "trainer.ppo.total_steps=50",
        "trainer.ppo.batch_size=256",
        "trainer.ppo.updates=4",
        "trainer.ppo.max_staleness=2",
        "trainer.ppo.lr=1e-3",
        "trainer.ppo.optimizer.schedule=linear",
        "trainer.ppo.advantage.type=dr_grpo",
        "trainer.ppo.loss.eps_high=0.28",
        "trainer.ppo.publisher.pause_mode=retract",
    ],
    curves=("eval/reward/as_x", "eval/reward/as_o", "reward/parts/illegal"),
)
