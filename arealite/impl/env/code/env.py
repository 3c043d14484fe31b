"""Programming tasks: an agent's program runs in a sandbox and is rewarded for passed test cases.

A program cannot read the expected results and cannot report itself as right. Its results are
compared in this module, and asserts run in a separate process of the sandbox (`harness.py`).
"""

import ast
import builtins
import json
import marshal
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.sandbox import CodeEnvConfig, SandboxFailed
from arealite.api.task import Row, Task
from arealite.base.errors import EpisodeError
from arealite.impl.env.code.tasks import generate
from arealite.impl.env.code.values import decode, encode, same, same_text
from arealite.impl.sandbox.process import Sandbox

MODULES = "values", "program", "asserts", "harness"
FENCE = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


class BrokenTests(EpisodeError, failure_class="code_tests"):
    """A row's tests are missing or cannot be run, so its programs get no reward."""


class Cases(NamedTuple):
    """The test cases of a row."""

    mode: str
    """One of stdio, calls and tests."""
    entry: str
    """Name of the tested function; "" for none."""
    work: dict[str, Any]
    """Input of the harness: inputs, calls or tests."""
    expected: list[Any]
    """Expected result of each case; [] in mode "tests"."""


class Verdict(NamedTuple):
    """The result of a program."""

    passed: int
    total: int
    is_loaded: bool
    """Whether the program was executed and defines the entry point."""


class CodeEnv(Env):
    """Asks for a program and scores it by test cases."""

    resumable = True

    @classmethod
    def rows(cls, config: CodeEnvConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield functions to complete, of the configured levels (none: 1), without end."""
        yield from generate(random.Random(f"code/{seed}/{split}"), [*config.levels] or [1], split)

    @staticmethod
    def check_row(task: Task, /) -> None:
        """Check that a row has test cases.

        Raises:
            BrokenTests: It has none.
        """
        read_cases(task, 1.0)

    async def setup(self) -> None:
        """Check that the sandbox works on this host."""
        self.sandbox = Sandbox(self.config.sandbox)
        await self.sandbox.setup()

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run the agent for one program; reward the share of passed cases, and a bonus for all.

        Raises:
            BrokenTests: The row's tests are missing or cannot be run.
            SandboxFailed: The sandbox could not run the program.
        """
        agent = agents["agent"]
        cases = read_cases(task, self.config.case_timeout_s)
        action = await agent.act(task.prompt)
        begin = time.perf_counter()
        verdict = await self.judge(program(action.text, task.text, cases.entry), cases)
        agent.record.seconds_scoring += time.perf_counter() - begin
        share = verdict.passed / verdict.total
        solved = float(verdict.passed == verdict.total)
        reward = share * self.config.partial + self.config.bonus * solved
        if not verdict.is_loaded:
            reward = self.config.error_reward
        agent.reward(reward, passed=share, solved=solved, loaded=float(verdict.is_loaded))

    async def judge(self, source: str, cases: Cases) -> Verdict:
        """Run all cases of a program in one sandbox.

        Raises:
            BrokenTests: The tests cannot be run.
            SandboxFailed: The sandbox or the harness failed.
        """
        names = cases.work.get("names", [cases.entry])
        parts = {"source": source, "entry": cases.entry, "names": names, "mode": cases.mode}
        job = json.dumps(parts)
        stdin = f"{len(job):010}{job}{json.dumps(cases.work)}"
        outcome = await self.sandbox.run(harness(), stdin=stdin)
        if outcome.status == "exited" and outcome.code != 0:
            raise SandboxFailed(f"the harness failed: {outcome.stderr[-500:]}")
        reports = [*parse_reports(outcome.stdout)]
        for report in reports:
            if "broken" in report:
                raise BrokenTests(": ".join(report["broken"]))
        results = [report for report in reports if "case" in report]
        counts = (sum(report.get(key, 0) for report in reports) for key in ("total", "of"))
        total = len(cases.expected) or max(*counts, 1)
        passed = sum(self._passed(result, cases.expected) for result in results)
        return Verdict(passed, total, any("loaded" in report for report in reports))

    def _passed(self, result: dict[str, Any], expected: list[Any]) -> int:
        """Return the number of passed cases in one report of the harness."""
        if "passed" in result:
            return int(result["passed"])
        wanted = expected[result["case"]]
        if "stdout" in result:
            is_same = same_text(result["stdout"], wanted, self.config.tolerance)
            return int(result["code"] == 0 and is_same)
        with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            got = decode(result["value"], lambda _: object()) if "value" in result else object()
            return int(same(got, wanted, self.config.tolerance))
        return 0


def parse_reports(text: str) -> Iterator[dict[str, Any]]:
    """Yield the reports in a harness's stdout; skip lines that are not JSON, as a truncated one."""
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            yield json.loads(line)


@cache
def harness() -> str:
    """Return a program that loads the compiled modules of the harness and runs the last one."""
    named = [f"arealite.impl.env.code.{name}" for name in MODULES[:-1]] + ["__main__"]
    texts = {name: Path(__file__).with_name(f"{name}.py").read_text() for name in MODULES}
    codes = [marshal.dumps(compile(text, name, "exec")) for name, text in texts.items()]
    return (
        f"import marshal, sys\nfor name, code in {[*zip(named, codes, strict=True)]!r}:\n"
        "    module = sys.modules[name] = type(sys)(name)\n"
        "    exec(marshal.loads(code), module.__dict__)\n"
    )


# ---------------------------------------------------------------- rows


def read_cases(task: Task, seconds: float) -> Cases:
    """Return the test cases of a row.

    A row holds `cases` [{args, kwargs, expected}] or [{stdin, stdout}], or `test` with a
    `check(candidate)` as in HumanEval, or `test_list` with asserts as in MBPP.

    Tests see one name of the program, the entry point. Without an entry point, they see every name
    that they read and do not define (see `names_read`). Functions that a prompt gives before the
    requested one are taken from the prompt, not from the program. Classes are taken from the
    program, because its functions receive their objects.

    Args:
        task: The row.
        seconds: Time limit of one case.

    Raises:
        BrokenTests: The row has no test cases.
    """
    info = task.extra_info
    timed = {"seconds": seconds}
    entry = info.get("entry_point") or ""
    cases = list(info.get("cases") or [])
    if cases and cases[0].get("stdin") is not None:
        work = timed | {"inputs": [case["stdin"] for case in cases]}
        return Cases("stdio", "", work, [case["stdout"] for case in cases])
    if cases and entry:
        calls = [[list(case.get("args") or []), dict(case.get("kwargs") or {})] for case in cases]
        work = timed | {"calls": encode(calls, str)}
        return Cases("calls", entry, work, [case["expected"] for case in cases])
    tests, (given, _) = list(info.get("test_list") or []), head_of(task.text, entry)
    if info.get("test") and entry:
        tests = [f"{info['test']}\ncheck(candidate)\n"]
    if not tests:
        what = f"{task.task_id}: extra_info has no test cases. Add cases (with entry_point,"
        raise BrokenTests(f"{what} or of stdin and stdout), test (with entry_point) or test_list.")
    setup = info.get("setup") or info.get("test_setup_code") or ""
    names = [entry] if entry else names_read([setup, *tests])
    if is_python(given):
        own, classes = without_classes(given)
        setup = f"{own}\n{setup}"
        names = [*names, *classes]
    work = timed | {"setup": setup, "tests": tests, "names": names}
    return Cases("tests", entry, work, [])


def names_read(sources: list[str]) -> list[str]:
    """Return the names that tests without an entry point read from the program.

    Builtin names are included only if there is no other name (MBPP has a task whose function is
    `sum`). A name of which only attributes are read (`math.isclose`) counts as a module.
    """
    nodes = [n for text in filter(is_python, sources) for n in ast.walk(ast.parse(text))]
    bases = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    names = [n for n in nodes if isinstance(n, ast.Name) and id(n) not in bases]
    made = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    read = {n.id for n in names} - made.union(getattr(n, "name", "") for n in nodes)
    return sorted(read - {*dir(builtins)} or read)


def without_classes(source: str) -> tuple[str, list[str]]:
    """Return a source without its top-level classes, and the names of these classes."""
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    tree.body = [node for node in tree.body if node not in classes]
    return ast.unparse(tree), [node.name for node in classes]


def program(text: str, prompt: str, entry: str) -> str:
    """Return the program in a completion.

    A prompt may be code that ends with the head of a function, as in HumanEval. Then the code
    before that function is part of the program, and a completion that does not define the function
    is its body.

    Args:
        text: The completion. Its last fenced block counts, or all of it without one.
        prompt: The prompt's text.
        entry: Name of the tested function; "" for none.
    """
    code, (before, head) = fenced(text), head_of(prompt, entry)
    name = re.escape(entry)
    if not re.search(rf"^(?:(?:async )?def|class) {name}\b|^{name} *=", code, re.MULTILINE):
        return head + code
    return f"{before}\n{code}" if before and is_python(before) else code


def fenced(text: str) -> str:
    """Return the last fenced block of a text; the whole text if there is none."""
    return [text, *FENCE.findall(text)][-1]


def head_of(prompt: str, entry: str) -> tuple[str, str]:
    """Return the code of a prompt before the function `entry`, and all of its code.

    Both are "" if the prompt does not define the function.
    """
    head = fenced(prompt)
    begin = head.find(f"def {entry}(") if entry else -1
    return (head[:begin], head) if begin >= 0 else ("", "")


@lru_cache(1024)
def is_python(text: str) -> bool:
    """Return whether a text is valid Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
