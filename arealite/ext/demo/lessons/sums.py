"""Add two numbers from 1 to 20. The reward has partial credit for the form and for the number."""

import random
import re

from arealite.api.reward import Score
from arealite.ext.demo.lesson import Lesson, LessonRow

LARGEST = 20
PAIRS = LARGEST * (LARGEST + 1) // 2
HELD_OUT_PAIRS = 40


def draw(rng: random.Random) -> LessonRow:
    """Draw a task."""
    first = rng.randint(1, LARGEST)
    second = rng.randint(1, LARGEST)
    question = f"What is {first} + {second}? Answer with the number alone."
    return {"prompt": [{"role": "user", "content": question}], "ground_truth": str(first + second)}


def numbers_of(row: LessonRow) -> tuple[str, ...]:
    """Return the two numbers of a task in order: 3 + 5 and 5 + 3 are the same task."""
    return tuple(sorted(re.findall(r"\d+", row["prompt"][-1]["content"])))


def sum_alone(completion: str, ground_truth: str) -> Score:
    """Return 1 for the right number alone, 0.5 for a text with it, 0.2 for a wrong number alone.

    Part `right`: the right number is in the answer, whatever its form.
    """
    answer = completion.strip()
    is_right = ground_truth in re.findall(r"\d+", answer)
    if answer == ground_truth:
        reward = 1.0
    elif is_right:
        reward = 0.5
    else:
        reward = 0.2 if answer.isdecimal() else 0.0
    return Score(reward, right=float(is_right))


LESSON = Lesson(
    about="add two numbers from 1 to 20, and answer with the number alone",
    draw=draw,
    key=numbers_of,
    reward=f"{__name__}:sum_alone",
    train_rows=PAIRS - HELD_OUT_PAIRS,
    eval_rows=HELD_OUT_PAIRS,
    eval_samples=8,
    max_new_tokens=12,
    shown_parts=["right"],
    options=[
        "trainer.ppo.total_steps=60",
        "trainer.ppo.batch_size=64",
        "trainer.ppo.lr=2e-5",
        "trainer.ppo.optimizer.schedule=linear",
    ],
)
