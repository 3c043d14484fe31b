"""Sort three names alphabetically.

The reward is dense: the share of places with the right name, squared. Without the square, a copy of
the question gets a third of the reward on average: in one run, the model learned only to copy.
"""

import random
from itertools import groupby
from pathlib import Path

from arealite.ext.demo.lesson import Lesson, LessonRow, assistant_message

NUM_NAMES = 3
NAMES = Path(__file__).with_name("first_names.txt").read_text().split()
"""First names that are one token of SmolLM2 each."""
NAMES_OF_LETTER = {letter: list(group) for letter, group in groupby(NAMES, key=lambda n: n[0])}
EXAMPLE = [
    {"role": "system", "content": "Sort the names alphabetically."},
    {"role": "user", "content": "Tom, Adam, Mia"},
    {"role": "assistant", "content": "Adam, Mia, Tom"},
]
"""The prompt's beginning: without an example, the model rarely answers with a list."""


def draw(rng: random.Random) -> LessonRow:
    """Draw a task: names with different first letters."""
    letters = rng.sample(sorted(NAMES_OF_LETTER), NUM_NAMES)
    names = [rng.choice(NAMES_OF_LETTER[letter]) for letter in letters]
    question = {"role": "user", "content": ", ".join(names)}
    return {"prompt": [*EXAMPLE, question], "ground_truth": ", ".join(sorted(names))}


def names_in_place(completion: str, ground_truth: str) -> float:
    """Return (right places / length of the longer list) squared."""
    wanted = ground_truth.split(", ")
    answered = completion.strip().split(", ")
    right = sum(a == b for a, b in zip(answered, wanted, strict=False))
    return (right / max(len(answered), len(wanted))) ** 2


LESSON = Lesson(
    about="sort three names alphabetically",
    draw=draw,
    key=lambda row: row["ground_truth"],
    reward=f"{__name__}:names_in_place",
    demonstrate=lambda row: [assistant_message(row["ground_truth"])],
    demonstrations=1024,
    warm_start=[
        "trainer.offline.lr=3e-5",
        "trainer.offline.batch_size=32",
        "trainer.offline.max_steps=16",
        "trainer.offline.optimizer.warmup_steps=4",
    ],
    max_new_tokens=16,
    options=[
        "trainer.ppo.total_steps=48",
        "trainer.ppo.batch_size=128",
        "trainer.ppo.lr=2e-5",
        "trainer.ppo.optimizer.warmup_steps=4",
        "trainer.ppo.advantage.type=dr_grpo",
    ],
)
