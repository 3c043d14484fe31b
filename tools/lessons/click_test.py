"""Train a tiny model to click the right button in Chromium: `make learn LESSON=click_test`.

The tasks are two of MiniWoB++. The warm-up shows pages as text, and clicks on random elements. The
model learns the right element from the reward of the page. The tokenizer drops unknown words.
"""

from __future__ import annotations

import random

from arealite.ext.demo.tiny_model import TinyModel
from tools.lesson import Example, Lesson

WORDS = ("Goal: Click ", "the button", "button ", '"Click Me!"', '"ONE"', '"TWO"', " ONE", "click ")
ENV = "trainer.ppo.collector.env"


def examples(rng: random.Random) -> Example:
    """Draw the text of a page, and a click on one of its elements or on a missing element."""
    goal, labels = ("the button.", ["Click Me!"])
    if rng.random() < 0.7:
        goal, labels = "the button ONE.", rng.sample(["ONE", "TWO"], 2)
    page = "\n".join(f'[{number}] button "{label}"' for number, label in enumerate(labels, 1))
    return f"Goal: Click {goal}\n{page}", f"click {rng.randint(1, 3)}"


LESSON = Lesson(
    about="a tiny model learns which button to click, in Chromium (MiniWoB++)",
    shape=TinyModel(
        hidden=64,
        layers=2,
        alphabet="0123456789",
        words=(*WORDS, *(f"\n[{n}] " for n in range(1, 4))),
        context=64,
    ),
    examples=examples,
    warm_up=0.32,
    overrides=[
        f"{ENV}.type=browser",
        f"{ENV}.browser.tasks=[click-test,click-test-2]",
        f"{ENV}.browser.max_steps=1",
        f"{ENV}.browser.browser.contexts=12",
        f"{ENV}.browser.browser.rules=none",
        f"{ENV}.browser.browser.max_chars=300",
        f"{ENV}.browser.browser.settle_ms=0",
        "dataset.train=generated",
        "dataset.eval=generated",
        "dataset.eval_rows=64",
        "trainer.ppo.collector.concurrency=12",
        "trainer.ppo.collector.sampling.max_new_tokens=4",
        "trainer.ppo.eval.sampling.max_new_tokens=4",
        "trainer.ppo.total_steps=30",
        "trainer.ppo.batch_size=128",
        "trainer.ppo.updates=4",
        "trainer.ppo.max_staleness=2",
        "trainer.ppo.lr=6e-4",
        "trainer.ppo.advantage.type=dr_grpo",
        "trainer.ppo.loss.eps_high=0.28",
        "trainer.ppo.publisher.pause_mode=retract",
    ],
    curves=("reward/click-test/mean", "reward/click-test-2/mean", "eval/reward"),
)
