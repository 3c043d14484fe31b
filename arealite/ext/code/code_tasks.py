"""Generate programming tasks of five levels, for first runs and curricula.

Level 1 asks for one expression. Levels 2 to 5 ask for a function with as many steps.
"""

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from arealite.api.task import Row
from arealite.base.files import read_toml

PROGRAMS: dict[str, dict[str, str]] = read_toml(__file__, "code_tasks.toml")
"""Python expressions by description, in groups."""
HELD_OUT = 8
"""One in HELD_OUT tasks is left out of the split train and used by all other splits. Level 1 alone
has too few tasks for that."""


def generate(rng: random.Random, levels: Sequence[int], split: str) -> Iterator[Row]:
    """Yield random rows without end; `ground_truth` is a right program, or expression (level 1)."""
    while levels == [1]:
        yield {**one_line(rng)}
    is_train = split == "train"
    while True:
        level = rng.choice(levels)
        row = one_line(rng) if level == 1 else steps(rng, level)
        description, _, _ = str(row["prompt"]).partition(">>>")
        is_held_out = zlib.crc32(description.encode()) % HELD_OUT == 0
        if is_held_out == is_train:
            continue
        extra_info = {**row["extra_info"], "level": level}
        yield {**row, "extra_info": extra_info}


def steps(rng: random.Random, level: int) -> dict[str, Any]:
    """Return a row that asks for a function of `level` steps; its cases have 3 or more results."""
    inner_steps = [*PROGRAMS["steps"].items()]
    last_steps = [*PROGRAMS["ends"].items()]
    chosen_steps = rng.sample(inner_steps, level - 1)
    chosen_steps.append(rng.choice(last_steps))
    descriptions: list[str] = []
    expressions: list[str] = []
    for description, expression in chosen_steps:
        constants = {
            "a": rng.randint(2, 5),
            "b": rng.randint(-5, 5),
        }
        descriptions.append(description.format(**constants))
        expressions.append(expression.format(**constants))
    inputs = [random_integers(rng) for _ in range(6)]
    results = [evaluate(expressions, integers) for integers in inputs]
    if len({*map(str, results)}) < 3:
        return steps(rng, level)
    cases: list[dict[str, Any]] = [
        {"args": [integers], "expected": result}
        for integers, result in zip(inputs, results, strict=True)
    ]
    example = cases.pop(0)
    head = (
        "def solve(values):\n"
        f'    """Take a list of integers, and {". Then ".join(descriptions)}.\n'
        "\n"
        f"    >>> solve({example['args'][0]})\n"
        f"    {example['expected']}\n"
        '    """\n'
    )
    *inner_expressions, last_expression = expressions
    body = "".join(f"    values = {expression}\n" for expression in inner_expressions)
    body += f"    return {last_expression}\n"
    return {
        "prompt": head,
        "ground_truth": head + body,
        "extra_info": {
            "entry_point": "solve",
            "cases": cases,
            "data_source": "steps",
        },
    }


def random_integers(rng: random.Random) -> list[int]:
    """Return 3 to 8 random integers."""
    length = rng.randint(3, 8)
    return [rng.randint(-20, 20) for _ in range(length)]


def evaluate(expressions: Sequence[str], values: object) -> object:
    """Return the result of expressions; each uses the result of the expression before."""
    for expression in expressions:
        values = eval(expression, {"values": values})
    return values


def one_line(rng: random.Random) -> dict[str, Any]:
    """Return a random row whose answer is an expression."""
    one_liners = [*PROGRAMS["one_liners"].items()]
    description, template = rng.choice(one_liners)
    constants = {
        "a": rng.randint(2, 9),
        "b": rng.randint(1, 9),
    }
    expression = template.format(**constants)
    cases = [
        {"args": [x], "expected": eval(expression, {"x": x})} for x in rng.sample(range(-20, 21), 5)
    ]
    return {
        "prompt": f"# {description.format(**constants)}\ndef f(x): return ",
        "ground_truth": expression,
        "extra_info": {
            "entry_point": "f",
            "cases": cases,
            "data_source": "one_line",
        },
    }
