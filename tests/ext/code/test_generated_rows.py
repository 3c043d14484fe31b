"""A thousand generated rows: right programs pass all cases, wrong ones some, cheats none."""

from __future__ import annotations

import asyncio
import doctest
import json
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from arealite.ext.code.env import program, read_cases
from arealite.ext.code.harness import AssertCases, Program, python_error, run_calls
from arealite.ext.code.json_values import decode, encode, same
from arealite.ext.code.program import OPERATIONS, describe
from tests.ext.code.generated import KINDS, GeneratedRow, generated_rows
from tests.ext.code.test_env import env, verdict  # noqa: F401  (a fixture)
from tests.ext.games.players import first_rows, make, task

ROWS, SEED = 1000, 15
DIGEST = 322487748
"""CRC-32 of the first two rows that version 0.2.0 generated."""


class HereProgram(Program):
    """A program in this process, whose results are encoded and decoded as usual."""

    def __init__(self, source: str, names: list[str]) -> None:
        super().__init__(None, -1, 1.0)  # pyright: ignore[reportArgumentType]
        self.pid, self.kept, made = 1, list[Any](), dict[str, Any]()
        exec(compile(source, "<program>", "exec"), made)
        self.names = {n: self.value(encode(made[n], self.keep), n) for n in names if n in made}

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept) - 1

    def ask(self, operation: str, *parts: Any) -> Any:
        data = [encode(part, self._pass) for part in parts]
        try:
            given = [decode(each, self.kept.__getitem__) for each in data]
            return encode(OPERATIONS[operation](*given), self.keep)
        except BaseException as error:  # noqa: BLE001  (as the program's own process does)
            raise python_error(*describe(error)) from None


def scorer(made: GeneratedRow) -> Callable[[str], tuple[int, int]]:
    """Return a function that gives (passed, total) cases of a program without a sandbox."""
    cases = read_cases(task(made.prompt, **made.info), 1.0)
    names = cases.work.get("names", [cases.entry])
    tests = AssertCases(cases.work, cases.entry) if cases.mode == "tests" else None

    def score(text: str) -> tuple[int, int]:
        running = HereProgram(program(text, made.prompt, cases.entry), names)
        said = list[dict[str, Any]]()
        report = lambda **known: said.append(known)  # noqa: E731
        if tests:
            tests.run(running, report)
            results = [each for each in said if "case" in each]
            return sum(each["passed"] for each in results), sum(each["of"] for each in results)
        run_calls(running, cases.entry, decode(cases.work["calls"], str), report)
        got = [decode(each.get("value"), lambda _: object()) for each in said]
        return sum(map(lambda *pair: same(*pair, 1e-6), got, cases.expected)), len(cases.expected)

    return score


def test_thousand_generated_rows_score_right():
    counted = Counter[str]()
    for number, made in enumerate(generated_rows(ROWS * 5 // 4, SEED)):
        if made.kind == "stdio":  # no tests run in the harness
            continue
        counted[made.kind] += 1
        score = scorer(made)
        others = [name for name in made.programs if name != "right"]
        for name in ("right", *others[number % 3 :: 3]):
            text, due = made.programs[name]
            found = score(text)
            assert found[0] == due, (number, made.info, name, found)
            if name in ("right", "innocent"):
                assert found == (due, made.total), (number, made.info, name)
    assert counted == dict.fromkeys(KINDS[:4], ROWS // 4)


@pytest.mark.parametrize("name", ["right", "innocent", "first"])
async def test_rows_of_all_kinds_score_right_in_the_sandbox(env, name):  # noqa: F811
    rows = list(generated_rows(10, SEED))
    found = await asyncio.gather(
        *(verdict(env, made.programs[name][0], made.info, prompt=made.prompt) for made in rows)
    )
    for made, each in zip(rows, found, strict=True):
        assert each.passed == made.programs[name][1], (made, each)
        if name in ("right", "innocent"):
            assert each.total == made.total


def generated(levels: list[int], count: int, split: str = "train") -> list[Any]:
    return first_rows(make("code", levels=levels), count, split=split)


@pytest.mark.parametrize("level", range(1, 6))
def test_reference_program_of_a_generated_task_passes_and_a_wrong_one_does_not(level: int) -> None:
    for row in generated([level] * 2, 100):
        info, text = row["extra_info"], row["ground_truth"]
        assert info["level"] == level
        score = scorer(GeneratedRow("calls", row["prompt"], info, 5, {}))
        assert score(text) == (5, 5), row
        passed, _ = score("def solve(values): return 1\ndef f(x): return None")
        assert passed < 5, row
        if level > 1:
            assert text.startswith(row["prompt"])
            body = text.removeprefix(row["prompt"])
            assert len(body.splitlines()) == level, "one line for each step"
            assert score(body) == (5, 5), "a completion may be the body only"
            space = dict[str, Any]()
            exec(text, space)
            (example,) = doctest.DocTestParser().get_examples(space["solve"].__doc__)
            assert repr(eval(example.source, space)) == example.want.strip()
            assert all(f"solve({case['args'][0]})" != example.source for case in info["cases"])


def test_splits_of_generated_programs_share_no_task_and_rows_of_level_1_are_unchanged() -> None:
    asks = {
        split: {row["prompt"].partition(">>>")[0] for row in generated([1, 2, 3], 600, split)}
        for split in ("train", "eval")
    }
    assert not asks["train"] & asks["eval"]
    assert len(asks["train"]) > 300
    assert generated([2, 3], 50) == generated([2, 3], 50)
    first = generated([1], 2)
    digest = zlib.crc32(json.dumps(first, sort_keys=True).encode())
    assert digest == DIGEST, "runs that use these rows must be able to resume"
    assert generated([], 2) == first
