"""Call a calculator in the model's own chat template, and answer with its result."""

import json
import operator
import random
from collections.abc import Sequence

from arealite.ext.demo.lesson import Lesson, LessonMessage, LessonRow, assistant_message

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SMALLEST = 10
LARGEST = 999
ENV = "trainer.ppo.collector.env.tools"


def call_of(expression: str) -> str:
    """Return the text that calls the calculator, in the Hermes format."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


SYSTEM = (
    f"You have a calculator. To call it for 2 + 3, write {call_of('2 + 3')}. "
    "Its result follows. Then answer with the number alone."
)
"""The prompt explains the tool: the chat template of SmolLM2-135M-Instruct renders no tools."""


def draw(rng: random.Random) -> LessonRow:
    """Draw a task."""
    first = rng.randint(SMALLEST, LARGEST)
    second = rng.randint(SMALLEST, LARGEST)
    symbol = rng.choice(list(OPERATORS))
    expression = f"{first} {symbol} {second}"
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {expression}?"},
        ],
        "ground_truth": str(OPERATORS[symbol](first, second)),
        "expression": expression,
        "extra_info": {"tools": ["calculator"]},
    }


def demonstrate(row: LessonRow) -> Sequence[LessonMessage]:
    """Return a call, its result and the answer."""
    result = {"role": "tool", "content": row["ground_truth"]}
    return [
        assistant_message(call_of(row["expression"])),
        result,
        assistant_message(row["ground_truth"]),
    ]


def number_alone(completion: str, ground_truth: str) -> float:
    """Return 1 for the right number alone, and 0.5 for a text that ends with it."""
    answer = completion.strip()
    if answer == ground_truth:
        return 1.0
    words = answer.removesuffix(".").split()
    return 0.5 if words and words[-1] == ground_truth else 0.0


LESSON = Lesson(
    about="call a calculator, and answer with its result",
    draw=draw,
    key=lambda row: row["expression"],
    reward=f"{__name__}:number_alone",
    env="tools",
    demonstrate=demonstrate,
    demonstrations=48,
    warm_start=[
        "trainer.offline.lr=3e-5",
        "trainer.offline.batch_size=16",
        "trainer.offline.max_steps=3",
        "trainer.offline.optimizer.warmup_steps=2",
    ],
    train_rows=1024,
    eval_rows=256,
    max_new_tokens=48,
    shown_parts=["tool"],
    options=[
        "trainer.ppo.collector.concurrency=64",
        "trainer.ppo.collector.agent.type=tool_use",
        f"{ENV}.max_turns=2",
        "trainer.ppo.total_steps=20",
        "trainer.ppo.batch_size=64",
        "trainer.ppo.lr=2e-5",
        "trainer.ppo.optimizer.warmup_steps=4",
        "trainer.ppo.advantage.type=dr_grpo",
    ],
)
