"""Train a tiny model in a debate that rules judge: `make learn LESSON=debate`.

There is no warm-up: at first the model writes random words of its vocabulary. It learns from the
scores which words count. The model has both seats.
"""

from __future__ import annotations

import random

from arealite.ext.demo.tiny_model import TinyModel
from tools.lesson import Example, Lesson

COUNT = "because therefore thus study data survey first next finally however"
OTHERS = "cities schools people money water music paper green never maybe quite rather table window"
WORDS = [f" {word}" for word in f"{COUNT} {OTHERS}".split()]
MARKS = ("You are pro", "You are con", "for the claim", "against the claim")
ENV = "trainer.ppo.collector.env"


def examples(rng: random.Random) -> Example:
    """Draw random words. They are hardly trained, because `max_steps` is 1."""
    return MARKS[0], "".join(rng.sample(WORDS, 6))


LESSON = Lesson(
    about="a tiny model learns which words count in a debate",
    shape=TinyModel(hidden=64, layers=2, alphabet=".", words=(*WORDS, *MARKS), context=128),
    examples=examples,
    max_steps=1,
    overrides=[
        f"{ENV}.type=debate",
        f"{ENV}.debate.rounds=1",
        f"{ENV}.debate.words=10",
        f"{ENV}.debate.win_reward=0.2",
        "dataset.train=generated",
        "trainer.ppo.collector.sampling.max_new_tokens=20",
        "trainer.ppo.total_steps=40",
        "trainer.ppo.batch_size=256",
        "trainer.ppo.updates=2",
        "trainer.ppo.max_staleness=2",
        "trainer.ppo.lr=1e-3",
        "trainer.ppo.optimizer.schedule=linear",
        "trainer.ppo.advantage.type=dr_grpo",
        "trainer.ppo.loss.eps_high=0.28",
    ],
    curves=("reward/parts/score", "reward/parts/evidence", "reward/parts/reasoning"),
)
