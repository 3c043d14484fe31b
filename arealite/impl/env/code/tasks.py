"""Generate programming tasks of five levels, for first runs and curricula.

Level 1 asks for one expression. Levels 2 to 5 ask for a function with as many steps.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from arealite.api.task import Row

ONE_LINERS = {
    "x plus {a}": ("x+{a}", lambda x, a, b: x + a),
    "x minus {a}": ("x-{a}", lambda x, a, b: x - a),
    "{a} minus x": ("{a}-x", lambda x, a, b: a - x),
    "x times {a}": ("x*{a}", lambda x, a, b: x * a),
    "x times {a} plus {b}": ("x*{a}+{b}", lambda x, a, b: x * a + b),
    "x times {a} minus {b}": ("x*{a}-{b}", lambda x, a, b: x * a - b),
    "the rest of x by {a}": ("x%{a}", lambda x, a, b: x % a),
    "the larger of x and {a}": ("max(x,{a})", lambda x, a, b: max(x, a)),
    "the smaller of x and {a}": ("min(x,{a})", lambda x, a, b: min(x, a)),
    "the square of x plus {a}": ("x*x+{a}", lambda x, a, b: x * x + a),
}
"""By description: the expression, and a function that computes its value."""
STEPS = {
    "add {a} to each number": "[x + {a} for x in values]",
    "multiply each number by {a}": "[x * {a} for x in values]",
    "keep only the numbers that {a} divides": "[x for x in values if x % {a} == 0]",
    "keep only the numbers above {b}": "[x for x in values if x > {b}]",
    "sort the numbers in ascending order": "sorted(values)",
    "reverse their order": "values[::-1]",
    "remove repetitions, and keep the first of equal numbers": "list(dict.fromkeys(values))",
    "replace negative numbers by 0": "[max(x, 0) for x in values]",
}
ENDS = {
    "return the numbers": "values",
    "return their sum": "sum(values)",
    "return how many numbers are left": "len(values)",
    "return the largest number, or 0 if none is left": "max(values, default=0)",
}
"""Programs by description: a Python expression of `values`, a list of integers."""
HELD_OUT = 8
"""One in HELD_OUT tasks is left out of the split train and used by all other splits. Level 1 alone
has too few tasks for that."""


def generate(rng: random.Random, levels: Sequence[int], split: str) -> Iterator[Row]:
    """Yield random rows without end; `ground_truth` is a right program, or expression (level 1)."""
    while levels == [1]:
        yield {**one_line(rng)}
    while True:
        level = rng.choice(levels)
        row = one_line(rng) if level == 1 else steps(rng, level)
        ask = str(row["prompt"]).partition(">>>")[0]
        if (zlib.crc32(ask.encode()) % HELD_OUT > 0) == (split == "train"):
            yield {**row, "extra_info": {**row["extra_info"], "level": level}}


def steps(rng: random.Random, level: int) -> dict[str, Any]:
    """Return a row that asks for a function of `level` steps; its cases have 3 or more results."""
    chosen = [*rng.sample([*STEPS.items()], level - 1), rng.choice([*ENDS.items()])]
    numbers = [{"a": rng.randint(2, 5), "b": rng.randint(-5, 5)} for _ in chosen]
    asks = [ask.format(**n) for (ask, _), n in zip(chosen, numbers, strict=True)]
    code = [source.format(**n) for (_, source), n in zip(chosen, numbers, strict=True)]
    inputs = [[rng.randint(-20, 20) for _ in range(rng.randint(3, 8))] for _ in range(6)]
    results = [evaluate(code, values) for values in inputs]
    if len({*map(str, results)}) < 3:
        return steps(rng, level)
    example, *cases = [{"args": [x], "expected": y} for x, y in zip(inputs, results, strict=True)]
    head = (
        f'def solve(values):\n    """Take a list of integers, and {". Then ".join(asks)}.\n\n'
        f'    >>> solve({example["args"][0]})\n    {example["expected"]}\n    """\n'
    )
    body = "".join(f"    values = {each}\n" for each in code[:-1]) + f"    return {code[-1]}\n"
    extra_info = {"entry_point": "solve", "cases": cases, "data_source": "steps"}
    return {"prompt": head, "ground_truth": head + body, "extra_info": extra_info}


def evaluate(code: Sequence[str], values: object) -> object:
    """Return the result of expressions; each uses the result of the expression before."""
    for each in code:
        values = eval(each, {"values": values})
    return values


def one_line(rng: random.Random) -> dict[str, Any]:
    """Return a random row whose answer is an expression."""
    ask = rng.choice([*ONE_LINERS])
    source, function = ONE_LINERS[ask]
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    arguments = rng.sample(range(-20, 21), 5)
    cases = [{"args": [x], "expected": function(x, a, b)} for x in arguments]
    return {
        "prompt": f"# {ask.format(a=a, b=b)}\ndef f(x): return ",
        "ground_truth": source.format(a=a, b=b),
        "extra_info": {"entry_point": "f", "cases": cases, "data_source": "one_line"},
    }
