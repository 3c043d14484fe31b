"""Generate programming tasks of five levels, for first runs and curricula.

Level 1 asks for one expression. Levels 2 to 5 ask for a function with as many steps.
"""

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from arealite.api.task import Row
from arealite.base.data import read_toml

PROGRAMS: dict[str, dict[str, str]] = read_toml(__file__, "tasks.toml")
"""Python expressions by description, in groups."""
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
    inner = [*PROGRAMS["steps"].items()]
    ends = [*PROGRAMS["ends"].items()]
    chosen = [*rng.sample(inner, level - 1), rng.choice(ends)]
    numbers = [{"a": rng.randint(2, 5), "b": rng.randint(-5, 5)} for _ in chosen]
    asks = [ask.format(**n) for (ask, _), n in zip(chosen, numbers, strict=True)]
    code = [source.format(**n) for (_, source), n in zip(chosen, numbers, strict=True)]
    inputs = [[rng.randint(-20, 20) for _ in range(rng.randint(3, 8))] for _ in range(6)]
    results = [evaluate(code, values) for values in inputs]
    if len({*map(str, results)}) < 3:
        return steps(rng, level)
    example, *cases = [{"args": [x], "expected": y} for x, y in zip(inputs, results, strict=True)]
    head = f'def solve(values):\n    """Take a list of integers, and {". Then ".join(asks)}.\n\n'
    head += f'    >>> solve({example["args"][0]})\n    {example["expected"]}\n    """\n'
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
    ask, source = rng.choice([*PROGRAMS["one_liners"].items()])
    numbers = {"a": rng.randint(2, 9), "b": rng.randint(1, 9)}
    code = source.format(**numbers)
    arguments = rng.sample(range(-20, 21), 5)
    cases = [{"args": [x], "expected": eval(code, {"x": x})} for x in arguments]
    return {
        "prompt": f"# {ask.format(**numbers)}\ndef f(x): return ",
        "ground_truth": code,
        "extra_info": {"entry_point": "f", "cases": cases, "data_source": "one_line"},
    }
