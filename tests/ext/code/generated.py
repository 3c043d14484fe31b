"""Seeded rows in the forms of HumanEval, MBPP and contests, and programs with known scores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

KINDS = "check", "helper", "list", "calls", "stdio"
EXPRESSIONS = {
    "int": ("{a} * x + {b}", "x * x - {a}", "x % {a} + {b}", "max(x, {a})", "abs(x - {a})"),
    "float": ("x / {a} + {b}", "x * 0.{a}", "(x + {b}) / 7"),
    "str": ("str(x) * {a}", "'a' * {b} + str(x)"),
    "list": ("[x] * {a}", "[x + {b}, x / {a}]", "list(range(x, x + {a}))"),
}
WRONG = {"int": "({}) + 1", "float": "({}) + 0.01", "str": "({}) + '!'", "list": "({}) + [0]"}
HELPER = "def shift(x):\n    return x + {c}\n\n\n"
INNOCENT = (
    "def max(*values):\n    return sorted(values)[-1]\n\n"
    "def abs(x):\n    return max(x, -x)\n\n"
    "def sum(values, total=0):\n    for value in values: total += value\n    return total\n\n"
)
"""Helpers that a right program may define."""
SHADOWS = (
    "True_ = True\nclass math:\n    isclose = staticmethod(lambda *a, **k: True)\n"
    "def abs(x): return 0\ndef isinstance(*a): return True\ndef all(x): return True\n"
    "def map(*a): return []\ndef zip(*a): return []\ndef len(x): return 2\n"
    "def shift(x): return 0\ndef check(candidate): pass\ncandidate = check\n"
    "def str(x): return ''\ndef round(*a): return 0\ndef list(x): return []\n"
)
CHEATS = {
    "shadow": SHADOWS + "def f(x): return 0.125\n",
    "raise": "def f(x): raise RuntimeError('no')\n",
    "stop": "def f(x): raise StopIteration\n",
    "nothing": "def f(x): return None\n",
    "equal": "class Any(int):\n    def __eq__(self, other): return True\n"
    "    def __hash__(self): return 0\n    __abs__ = __sub__ = lambda self, *a: self\n"
    "    __lt__ = __le__ = __float__ = __eq__\ndef f(x): return Any(-77)\n",
    "empty": "def f(x): return []\n",
}


class GeneratedRow(NamedTuple):
    """A row and the expected scores of its programs."""

    kind: str
    prompt: str
    info: dict[str, Any]
    total: int
    programs: dict[str, tuple[str, int]]
    """By name: a program and the number of cases that it passes."""


def generated_rows(count: int, seed: int) -> Iterator[GeneratedRow]:
    """Yield rows of all kinds in turn."""
    rng = random.Random(f"made/{seed}")
    for number in range(count):
        yield made_row(rng, KINDS[number % len(KINDS)])


def made_row(rng: random.Random, kind: str) -> GeneratedRow:
    """Return a row whose function takes an integer."""
    type_ = rng.choice([*EXPRESSIONS])
    a, b, c = rng.randint(2, 9), rng.randint(1, 9), rng.randint(1, 9)
    right = rng.choice(EXPRESSIONS[type_]).format(a=a, b=b)
    wrong = WRONG[type_].format(right)
    inputs = rng.sample(range(1, 60), 6)
    due = {x: eval(right, {"x": x}) for x in inputs}
    prompt = f"def f(x: int):\n    '''Return a {type_} made of x.'''\n"
    if kind in ("calls", "stdio"):
        info, passing = cases(kind, due), [{x} for x in inputs]
    else:
        tests, passing = asserts(rng, type_, due)
        if kind == "helper":
            prompt = HELPER.format(c=c) + prompt
            tests.append(f"assert candidate(shift({inputs[0] - c})) == {due[inputs[0]]!r}")
            passing.append({inputs[0]})
        info = as_list(tests) if kind == "list" else as_check(rng, tests, passing)
    first = f"{right} if x == {inputs[0]} else {wrong}"
    bodies = {"right": right, "wrong": wrong, "first": first}
    texts = {name: f"def f(x):\n    return {body}\n" for name, body in bodies.items()}
    if info.get("raises"):
        texts["right"] = texts["right"].replace("\n", "\n    if x < 0: raise ValueError\n", 1)
    texts |= {"innocent": INNOCENT + texts["right"], **CHEATS}
    if kind == "stdio":
        texts = {name: f"{text}print(f(int(input())))\n" for name, text in texts.items()}
    good = {"right": {*inputs}, "innocent": {*inputs}, "first": {inputs[0]}}
    return GeneratedRow(
        kind,
        prompt,
        info,
        len(passing) + bool(info.get("raises")),
        {
            name: (
                text,
                sum(need <= good.get(name, set()) for need in passing)
                + (bool(info.get("raises")) and name in ("right", "innocent")),
            )
            for name, text in texts.items()
        },
    )


def cases(kind: str, due: dict[int, Any]) -> dict[str, Any]:
    """Return cases with arguments or with stdin."""
    if kind == "stdio":
        return {"cases": [{"stdin": f"{x}\n", "stdout": f"{y}\n"} for x, y in due.items()]}
    return {"entry_point": "f", "cases": [{"args": [x], "expected": y} for x, y in due.items()]}


def asserts(rng: random.Random, type_: str, due: dict[int, Any]) -> tuple[list[str], list[set]]:
    """Return statements with asserts and, for each case, the inputs whose results must be right."""
    pairs = [*due.items()]
    xs, ys = [*due], [*due.values()]
    near = "abs(got - due) < 1e-6" if type_ == "float" else "got == due"
    ways = {
        "loop": (f"for x, due in {pairs}:\n    got = candidate(x)\n    assert {near}", pairs),
        "zip": (f"for got, due in zip(map(candidate, {xs}), {ys}):\n    assert {near}", pairs),
        "all": (f"assert all(candidate(x) == due for x, due in {pairs})", None),
        "map": (f"assert all(map(lambda x, y: candidate(x) == y, {xs}, {ys}))", None),
        "each": ("\n".join(f"assert candidate({x}) == {y!r}" for x, y in pairs), pairs),
        "kind": (
            f"assert isinstance(candidate({xs[0]}), {type_}) and candidate({xs[0]}) == {ys[0]!r}",
            [pairs[0]],
        ),
        "plain": (
            f"if candidate({xs[0]}) != {ys[0]!r}:\n    assert False, 'differs'\n"
            f"assert candidate({xs[0]}) == {ys[0]!r}",
            [pairs[0]],
        ),
    }
    if type_ == "float":
        lines = [f"assert math.isclose(candidate({x}), {y!r}, rel_tol=1e-9)" for x, y in pairs]
        ways["close"] = "\n".join(lines), pairs
    chosen = rng.sample([*ways], 3)
    if "loop" not in chosen and "each" not in chosen:
        chosen.append("each")  # otherwise a test that ends early hides its number of cases
    passing = list[set]()
    for of in (ways[way][1] for way in chosen):
        passing += [{*due}] if of is None else [{x} for x, _ in of]
    return [ways[way][0] for way in chosen], passing


def as_check(rng: random.Random, tests: list[str], passing: list[set]) -> dict[str, Any]:
    """Return a test in HumanEval's form, including asserts that no program can fail."""
    more = [
        "assert True, 'This prints if this assert fails 1 (good for debugging!)'",
        "assert 1 + 1 == 2",
        "assert len([1, 2]) == 2",
        "assert callable(candidate)",
    ]
    lines = [*tests, *rng.sample(more, 2)]
    raises = rng.random() < 0.5
    if raises:
        lines.append("try:\n    candidate(-1)\n    assert False\nexcept ValueError:\n    pass")
    body = "\n".join(lines).replace("\n", "\n    ")
    text = f"import math\n\nMETADATA = {{}}\n\ndef check(candidate):\n    {body}\n"
    return {"entry_point": "f", "test": text, "raises": raises}


def as_list(tests: list[str]) -> dict[str, Any]:
    """Return tests in MBPP's form, without an entry point."""
    lines = [test.replace("candidate", "f") for test in tests]
    return {"setup": "import math", "test_list": [*lines, "assert True"]}
