"""`make learn LESSON=click_test`: a tiny model learns to click what it is told to, in Chromium.

Three of MiniWoB++'s tasks. It is shown how pages are told and that elements are clicked, and the
right one half of the time. Of texts it reads the labels of buttons; other words vanish.
"""

from __future__ import annotations

import random

from tools.lesson import Example, Lesson
from tools.make_tiny_model import TinyModel

LABELS = ["submit", "okay", "ok", "yes", "no", "cancel", "next", "previous"]
LABELS += [label.capitalize() for label in LABELS]
TEXT = "a b c"
RIGHT = 0.5
"""Of the clicks that are shown; the others are on any element."""
WORDS = ("Goal: Click ", "on the ", "the button", "button ", "textbox", "div ", "span ", "click ")
WORDS += ('"Click Me!"', '"ONE"', '"TWO"', "ONE")
ENV = "trainer.ppo.collector.env"


def examples(rng: random.Random) -> Example:
    """Draw a page as it is told, and a click on it."""
    task = rng.random()
    if task < 0.1:
        lines, goal, right = ['button "Click Me!"'], "the button.", 0
    elif task < 0.3:
        lines, goal, right = ['button "ONE"', 'button "TWO"'], "button ONE.", 0
    else:
        lines = page(rng)
        label, right = rng.choice([(x[7:], n) for n, x in enumerate(lines) if x[:6] == "button"])
        goal = f"on the {label} button."
    told = "\n".join(f"[{number}] {line}" for number, line in enumerate(lines, 1))
    clicked = right if rng.random() < RIGHT else rng.randrange(len(lines))
    return f"Goal: Click {goal}\n{told}", f"click {clicked + 1}"


def page(rng: random.Random) -> list[str]:
    """Draw the elements of a page of click-button, at least one of them a button."""
    lines: list[str] = []
    for left in range(5, -1, -1):
        kind = rng.randrange(3)
        if kind == 2 or (left == 0 and not any(line.startswith("button") for line in lines)):
            lines.append(f'button "{rng.choice(LABELS)}"')
        elif kind == 1:
            lines += ([f'span "{TEXT}:"'] if rng.random() < 0.5 else []) + ["textbox"]
        else:
            lines.append(f'div "{TEXT}"')
    return lines


LESSON = Lesson(
    about="a tiny model learns to click the right button, in Chromium (MiniWoB++)",
    shape=TinyModel(
        hidden=64,
        layers=2,
        alphabet="0123456789",
        words=(*WORDS, *(f"\n[{n}] " for n in range(1, 13)), *(f'"{label}"' for label in LABELS)),
        context=64,
    ),
    examples=examples,
    warm_up=0.33,
    overrides=[
        f"{ENV}.type=browser",
        f"{ENV}.browser.tasks=[click-test,click-test-2,click-button]",
        f"{ENV}.browser.max_steps=1",
        f"{ENV}.browser.browser.contexts=12",
        f"{ENV}.browser.browser.rules=none",
        f"{ENV}.browser.browser.max_chars=300",
        f"{ENV}.browser.browser.settle_ms=0",
        "dataset.train=generated",
        "dataset.eval=generated",
        "dataset.eval_rows=96",
        "trainer.ppo.collector.concurrency=12",
        "trainer.ppo.collector.sampling.max_new_tokens=4",
        "trainer.ppo.eval.sampling.max_new_tokens=4",
        "trainer.ppo.eval.every_steps=10",
        "trainer.ppo.total_steps=30",
        "trainer.ppo.batch_size=128",
        "trainer.ppo.updates=4",
        "trainer.ppo.max_staleness=2",
        "trainer.ppo.lr=6e-4",
        "trainer.ppo.advantage.type=dr_grpo",
        "trainer.ppo.loss.eps_high=0.28",
        "trainer.ppo.publisher.pause_mode=retract",
    ],
    curves=("reward/click-test/mean", "reward/click-test-2/mean", "reward/click-button/mean"),
)
