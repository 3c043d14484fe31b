"""Train a tiny model to call a calculator only when it needs one: `make learn LESSON=calculator`.

The warm-up shows answers with and without a call, at random. So the model calls the calculator for
easy sums, which it can compute itself, and for hard sums, which it cannot. The reward counts right
answers, and for these, few calls.
"""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

from arealite.ext.demo.tiny_model import TinyModel
from arealite.ext.tools.config import ArithmeticConfig
from arealite.ext.tools.env import arithmetic
from tools.lesson import Example, Lesson

OPEN = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CLOSE = '"}}</tool_call>'
TASKS = {"digits": 2, "easy": 0.5, "prompt": "{}="}
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "{% set made = call['function'] %}<tool_call>{{ {'name': made['name'], 'arguments': "
    "made['arguments']} | tojson }}</tool_call>{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% elif m['role'] == 'tool' %}={% endif %}"
    "{% endfor %}"
)
ENV = "trainer.ppo.collector.env"


def examples(rng: random.Random) -> Example:
    """Draw a task and one demonstration: a call, the answer after a call, or the answer alone."""
    config = ArithmeticConfig(**TASKS)
    (row,) = islice(arithmetic(config, split="train", seed=rng.randrange(2**32)), 1)
    prompt: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    call = f"{OPEN}{row['prompt'].removesuffix('=')}{CLOSE}"
    way = rng.random()
    if way < 0.3:
        prompt += [
            {"role": "assistant", "content": call},
            {"role": "tool", "content": row["ground_truth"]},
        ]
    return prompt, call if 0.3 <= way < 0.65 else row["ground_truth"]


LESSON = Lesson(
    about="a tiny model learns when to call the calculator",
    shape=TinyModel(
        hidden=64, layers=2, alphabet="0123456789+-*=", words=(OPEN, CLOSE), context=64
    ),
    examples=examples,
    chat_template=TEMPLATE,
    warm_up=0.5,
    overrides=[
        f"{ENV}.type=tools",
        *(f'{ENV}.tools.arithmetic.{name}="{value}"' for name, value in TASKS.items()),
        f"{ENV}.tools.weights.efficiency=0.5",
        f"{ENV}.tools.max_turns=3",
        "trainer.ppo.collector.agent.type=tool_use",
        "dataset.train=generated",
        "dataset.eval=generated",
        "trainer.ppo.collector.sampling.max_new_tokens=12",
        "trainer.ppo.eval.sampling.max_new_tokens=12",
        "trainer.ppo.total_steps=60",
        "trainer.ppo.optimizer.schedule=linear",
        "trainer.ppo.batch_size=256",
        "trainer.ppo.updates=2",
        "trainer.ppo.max_staleness=2",
        "trainer.ppo.lr=4e-4",
        "trainer.ppo.advantage.type=dr_grpo",
        "trainer.ppo.loss.eps_high=0.28",
        "trainer.ppo.publisher.pause_mode=retract",
    ],
    curves=(
        "reward/parts/correct",
        "reward/parts/tool",
        "episode/arithmetic/turns_mean",
        "episode/easy_arithmetic/turns_mean",
    ),
)
