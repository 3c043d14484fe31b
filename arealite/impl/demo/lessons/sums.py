"""Add two numbers from 1 to 20. The reward has partial credit for the form and for the number."""

import random
import re

from arealite.impl.demo.lesson import Lesson, Row

LARGEST = 20
PAIRS = LARGEST * (LARGEST + 1) // 2
HELD_OUT_PAIRS = 40


def draw(rng: random.Random) -> Row:
    """Draw a task."""
    first, second = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
    question = f"What is {first} + {second}? Answer with the number alone."
    return {"prompt": [{"role": "user", "content": question}], "ground_truth": str(first + second)}


def numbers_of(row: Row) -> tuple[str, ...]:
    """Return the two numbers of a task in order: 3 + 5 and 5 + 3 are the same task."""
    return tuple(sorted(re.findall(r"\d+", row["prompt"][-1]["content"])))


def sum_alone(completion: str, ground_truth: str) -> float:
    """Return 1 for the right number alone, 0.5 for a text with it, 0.2 for a wrong number alone."""
    answer = completion.strip()
    if answer == ground_truth:
        return 1.0
    if ground_truth in re.findall(r"\d+", answer):
        return 0.5
    return 0.2 if answer.isdecimal() else 0.0


LESSON = Lesson(
    about="add two numbers from 1 to 20, and answer with the number alone",
    draw=draw,
    key=numbers_of,
    reward=f"{__name__}:sum_alone",
    train_rows=PAIRS - HELD_OUT_PAIRS,
    eval_rows=HELD_OUT_PAIRS,
    eval_samples=8,
    max_new_tokens=12,
    options=[
        "trainer.ppo.total_steps=60",
        "trainer.ppo.batch_size=64",
        "trainer.ppo.lr=2e-5",
        "trainer.ppo.optimizer.schedule=linear",
    ],
)
