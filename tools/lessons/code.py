"""Train a tiny model to write functions of one line: `make learn LESSON=code`.

The warm-up shows expressions that often have a wrong sign or number, so the model writes such
expressions. The reward comes from test cases in the sandbox.
"""

from __future__ import annotations

import random

from arealite.ext.code.code_tasks import one_line
from arealite.ext.demo.tiny_model import TinyModel
from tools.lesson import Example, Lesson

SIGNS = "+-*%"
WORDS = [" plus ", " minus ", " times ", " by ", " and "]
WORDS += [f"the {word} of " for word in ("rest", "larger", "smaller", "square")]


def examples(rng: random.Random) -> Example:
    """Draw a task and its answer, with a changed sign or number in 60 % of the cases."""
    row = one_line(rng)
    prompt, answer = row["prompt"], row["ground_truth"]
    if rng.random() < 0.6:
        places = [n for n, letter in enumerate(answer) if letter in SIGNS or letter.isdigit()]
        place = rng.choice(places)
        others = SIGNS if answer[place] in SIGNS else "123456789"
        answer = answer[:place] + rng.choice(others) + answer[place + 1 :]
    return prompt, answer


ENV = "trainer.ppo.collector.env"
LESSON = Lesson(
    about="a tiny model learns to write functions of one line",
    shape=TinyModel(
        hidden=64,
        layers=2,
        alphabet="0123456789+-*%(),x",
        words=("# ", "\ndef f(x): return ", "max(", "min(", *WORDS),
        context=64,
    ),
    examples=examples,
    warm_up=0.3,
    overrides=[
        f"{ENV}.type=code",
        f"{ENV}.code.sandbox.concurrency=8",
        "dataset.train=generated",
        "trainer.ppo.collector.sampling.max_new_tokens=12",
        "trainer.ppo.total_steps=40",
        "trainer.ppo.batch_size=64",
        "trainer.ppo.optimizer.schedule=linear",
        "trainer.ppo.updates=2",
        "trainer.ppo.max_staleness=2",
        "trainer.ppo.lr=5e-4",
        "trainer.ppo.advantage.type=dr_grpo",
        "trainer.ppo.loss.eps_high=0.28",
        "trainer.ppo.publisher.pause_mode=retract",
    ],
    curves=("reward/parts/solved", "reward/parts/passed", "reward/parts/loaded"),
)
