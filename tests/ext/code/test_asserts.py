"""Splitting tests into cases, and detecting broken tests independently of the program."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from arealite.ext.code.asserts import Instrumented
from arealite.ext.code.env import BrokenTests, read_cases
from tests.ext.code.test_env import env, verdict  # noqa: F401  (a fixture)
from tests.ext.games.players import task

RIGHT = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x + 1\n"


def check(*lines: str) -> dict[str, Any]:
    body = "".join(f"    {line}\n" for text in lines for line in text.splitlines())
    return {"entry_point": "f", "test": f"def check(candidate):\n{body}"}


@pytest.mark.parametrize(
    ("source", "cases"),
    [
        ("assert f(1) == 2", 1),
        ("assert True\nassert f(1) == 2\nassert 1 == 1", 1),
        ("if f(1): assert f(1) == 2\nelse: assert f(2) == 2", 0),
        ("try: assert f(-1)\nexcept ValueError: pass\nassert f(1) == 2", 2),
        ("f(1)", 1),
        ("assert True", 1),
    ],
)
def test_cases_outside_of_conditions_always_count(source: str, cases: int) -> None:
    assert len(Instrumented(source, count()).always) == cases


@pytest.mark.parametrize(
    ("info", "passed"),
    [
        (check("assert True", "assert candidate(1) == 2"), 1),
        (check("two = 2", "assert two == 2", "assert candidate(1) == two"), 1),
        (check("r = candidate(1)", "assert r == 2", "assert True", "assert len([r]) == 1"), 1),
        (check("try:\n    candidate(-1)\n    assert False\nexcept ValueError: pass"), 1),
        (check("try: candidate(-1)\nexcept ValueError: pass\nelse: assert False"), 1),
        (check("if candidate(1) != 2: assert False, 'differs'"), 1),
        (check("if candidate(1) != 2: raise TypeError", "assert candidate(2) == 3"), 1),
        (check("r = candidate(1)", "if r is None: assert r\nelse: assert r == 2"), 1),
        (
            check("try: assert candidate(1) == 1\nexcept AssertionError: assert candidate(1) == 2"),
            1,
        ),
        (check("assert isinstance(candidate(1), int)", "assert candidate(1) in (2, 3)"), 2),
        ({"test_list": ["assert f(1) == 2", "assert True"]}, 1),
    ],
)
async def test_right_program_passes_all_and_raising_program_none(
    env,  # noqa: F811
    info: dict[str, Any],
    passed: int,
) -> None:
    assert await verdict(env, RIGHT, info) == (passed, passed, True)
    for wrong in ("raise RuntimeError", "return 77.5"):
        assert (await verdict(env, f"def f(x): {wrong}", info)).passed == 0, wrong


async def test_program_that_ends_a_test_early_fails_its_remaining_cases(env) -> None:  # noqa: F811
    info = check(f"for x in {[*range(20)]}:\n    y = candidate(x)\n    assert y == x + 1")
    text = "def f(x):\n    if x > 1: raise RuntimeError\n    return x + 1"
    assert await verdict(env, text, info) == (2, 20, True)


BROKEN = {
    "unknown name": (check("assert known(candidate(1))"), "name 'known' is not defined"),
    "unknown name after a call": (
        check("r = candidate(1)", "assert known(r)"),
        "name 'known' is not defined",
    ),
    "no case": (check("assert True"), "pass whatever the program does"),
    "nothing": (check("pass"), "pass whatever the program does"),
    "import": (check("import nothing_of_this_name", "assert candidate(1)"), "nothing_of_this_name"),
    "without end": (check("while not candidate(1): pass", "assert candidate(1)"), "does not end"),
    "two names": ({"entry_point": "f", "test_list": ["assert g(f(1))"]}, "name 'g' is not"),
    "a module": ({"test_list": ["assert math.isclose(f(1), 2)"]}, "name 'math' is not"),
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_broken_test_is_detected_with_any_program(env, kind) -> None:  # noqa: F811
    info, says = BROKEN[kind]
    for text in (RIGHT, "import os\nos._exit(0)"):
        with pytest.raises(BrokenTests, match=says):
            await verdict(env, text, info)


async def test_program_cannot_lead_a_test_to_a_broken_part(env) -> None:  # noqa: F811
    """A program can only pass or fail its cases."""
    lines = (
        "if candidate(1) == 'x': import nothing_of_this_name",
        "if candidate(1) == 'x': assert candidate(lambda: 1)",
        "if candidate(1) == 'x': assert known(1)",
        "assert candidate(1) == 2",
    )
    for line in lines[:3]:
        info = check(line, lines[3])
        assert (await verdict(env, "def f(x): return 'x'", info)).passed == 0
        assert await verdict(env, RIGHT, info) == (1, 1, True)


async def test_helpers_come_from_the_prompt_and_classes_from_the_program(env) -> None:  # noqa: F811
    prompt = (
        "class Node:\n    def __init__(self, x, to=None): self.x, self.to = x, to\n\n"
        "def linked(xs) -> 'Node | None':\n    node = None\n"
        "    for x in reversed(xs): node = Node(x, node)\n    return node\n\n"
        "def listed(node: Node | None) -> list[int]:\n    xs = []\n"
        "    while node is not None:\n        xs.append(node.x)\n        node = node.to\n"
        "    return xs\n\ndef flip(node):\n"
    )
    test = "def check(candidate):\n    flipped = candidate(linked([1, 2, 3]))\n"
    test += "    assert isinstance(flipped, Node) and listed(flipped) == [3, 2, 1]\n"
    info = {"entry_point": "flip", "test": test}
    body = "    last = None\n    while node: last, node = Node(node.x, last), node.to\n"
    assert await verdict(env, body + "    return last", info, prompt=prompt) == (1, 1, True)
    forged = "def listed(node): return [3, 2, 1]\ndef flip(node): return node"
    assert await verdict(env, forged, info, prompt=prompt) == (0, 1, True)


async def test_entry_point_may_be_a_class(env) -> None:  # noqa: F811
    lines = "s = candidate()", "s.push(3)", "assert s.top() == 3 and isinstance(s, candidate)"
    text = "class f:\n    def __init__(self): self.of = []\n"
    text += "    def push(self, x): self.of.append(x)\n    def top(self): return self.of[-1]\n"
    assert await verdict(env, text, check(*lines)) == (1, 1, True)
    assert (await verdict(env, "class f: pass", check(*lines))).passed == 0


async def test_large_global_values_stay_with_the_program(env) -> None:  # noqa: F811
    text = f"table = list(range(200_000))\nlog = object()\n{RIGHT}"
    assert await verdict(env, text, check("assert candidate(1) == 2")) == (1, 1, True)


@pytest.mark.parametrize(
    ("tests", "names"),
    [
        (["assert sum(10, 15) == 6"], ["sum"]),
        (["assert abs(f(1) - 2) < 1", "assert sum([f(1)]) == 2"], ["f"]),
        (["p = Pair(1, 2)\nassert area([p]) == 2 and p.x == 1"], ["Pair", "area"]),
        (["import math\nassert math.isclose(f(1), 2)"], ["f"]),
    ],
)
def test_tests_without_an_entry_point_see_the_names_they_read(
    tests: list[str], names: list[str]
) -> None:
    assert read_cases(task(test_list=tests), 1.0).work["names"] == names
