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
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.base.errors import EpisodeError
from arealite.ext.code.code_tasks import generate
from arealite.ext.code.config import CodeEnvConfig
from arealite.ext.code.json_values import decode, encode, same, same_text
from arealite.ext.sandbox.config import SandboxFailed
from arealite.ext.sandbox.sandbox import Sandbox

MODULES = ("json_values", "program", "asserts", "harness")
FENCE = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


class BrokenTests(EpisodeError, failure_class="code_tests"):
    """A row's tests are missing or cannot be run, so its programs get no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
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
    prompt_use = "only"

    @classmethod
    def rows(cls, config: CodeEnvConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield functions to complete, of the configured levels (none: 1), without end."""
        rng = random.Random(f"code/{seed}/{split}")
        levels = [*config.levels] or [1]
        yield from generate(rng, levels, split)

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
        source = program(action.text, task.text, cases.entry)
        verdict = await self.judge(source, cases)
        agent.record.seconds_scoring += time.perf_counter() - begin
        passed_share = verdict.passed / verdict.total
        solved = float(verdict.passed == verdict.total)
        if verdict.is_loaded:
            reward = passed_share * self.config.partial + self.config.bonus * solved
        else:
            reward = self.config.error_reward
        agent.reward(
            reward,
            passed=passed_share,
            solved=solved,
            loaded=float(verdict.is_loaded),
        )

    async def judge(self, source: str, cases: Cases) -> Verdict:
        """Run all cases of a program in one sandbox.

        Raises:
            BrokenTests: The tests cannot be run.
            SandboxFailed: The sandbox or the harness failed.
        """
        job = {
            "source": source,
            "entry": cases.entry,
            "names": cases.work.get("names", [cases.entry]),
            "mode": cases.mode,
        }
        job_json = json.dumps(job)
        stdin = f"{len(job_json):010}{job_json}{json.dumps(cases.work)}"
        outcome = await self.sandbox.run(harness(), stdin=stdin)
        if outcome.status == "exited" and outcome.code != 0:
            raise SandboxFailed(f"the harness failed: {outcome.stderr[-500:]}")
        reports = [*parse_reports(outcome.stdout)]
        for report in reports:
            if "broken" in report:
                raise BrokenTests(": ".join(report["broken"]))
        of_cases = [report for report in reports if "case" in report]
        return Verdict(
            passed=sum(self._passed(report, cases.expected) for report in of_cases),
            total=len(cases.expected) or reported_total(reports),
            is_loaded=any("loaded" in report for report in reports),
        )

    def _passed(self, report: dict[str, Any], expected: list[Any]) -> int:
        """Return the number of passed cases in one report of the harness."""
        if "passed" in report:
            return int(report["passed"])
        tolerance = self.config.tolerance
        expected_result = expected[report["case"]]
        if "stdout" in report:
            is_same = same_text(report["stdout"], expected_result, tolerance)
            return int(report["code"] == 0 and is_same)
        with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            got: object = object()
            if "value" in report:
                got = decode(report["value"], lambda _: object())
            return int(same(got, expected_result, tolerance))
        return 0


def reported_total(reports: list[dict[str, Any]]) -> int:
    """Return the number of cases: announced by the harness or in its reports, at least 1."""
    num_announced = sum(report.get("total", 0) for report in reports)
    num_reported = sum(report.get("of", 0) for report in reports)
    return max(num_announced, num_reported, 1)


def parse_reports(stdout: str) -> Iterator[dict[str, Any]]:
    """Yield the reports in a harness's stdout; skip lines that are not JSON, as a truncated one."""
    for line in stdout.splitlines():
        with suppress(ValueError, RecursionError):
            yield json.loads(line)


@cache
def harness() -> str:
    """Return a program that loads the compiled modules of the harness and runs the last one."""
    named_codes: list[tuple[str, bytes]] = []
    for name in MODULES:
        source = Path(__file__).with_name(f"{name}.py").read_text()
        code = marshal.dumps(compile(source, name, "exec"))
        is_main = name == MODULES[-1]
        module_name = "__main__" if is_main else f"arealite.ext.code.{name}"
        named_codes.append((module_name, code))
    return (
        "import marshal, sys\n"
        f"for name, code in {named_codes!r}:\n"
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
    entry = info.get("entry_point") or ""
    cases = list(info.get("cases") or [])
    if cases and cases[0].get("stdin") is not None:
        inputs = [case["stdin"] for case in cases]
        return Cases(
            mode="stdio",
            entry="",
            work={"seconds": seconds, "inputs": inputs},
            expected=[case["stdout"] for case in cases],
        )
    if cases and entry:
        calls = [arguments_of(case) for case in cases]
        return Cases(
            mode="calls",
            entry=entry,
            work={"seconds": seconds, "calls": encode(calls, str)},
            expected=[case["expected"] for case in cases],
        )
    return read_asserts(task, entry, seconds)


def arguments_of(case: dict[str, Any]) -> list[Any]:
    """Return the positional arguments and the keyword arguments of a case."""
    args = list(case.get("args") or [])
    kwargs = dict(case.get("kwargs") or {})
    return [args, kwargs]


def read_asserts(task: Task, entry: str, seconds: float) -> Cases:
    """Return the asserts of a row as test cases; see `read_cases`."""
    info = task.extra_info
    tests = list(info.get("test_list") or [])
    code_before_entry, _ = head_of(task.text, entry)
    if info.get("test") and entry:
        tests = [f"{info['test']}\ncheck(candidate)\n"]
    if not tests:
        raise BrokenTests(
            f"{task.task_id}: extra_info has no test cases. "
            "Add cases (with entry_point, or of stdin and stdout), "
            "test (with entry_point) or test_list."
        )
    setup = info.get("setup") or info.get("test_setup_code") or ""
    names = [entry] if entry else names_read([setup, *tests])
    if is_python(code_before_entry):
        functions, class_names = without_classes(code_before_entry)
        setup = f"{functions}\n{setup}"
        names = [*names, *class_names]
    work = {
        "seconds": seconds,
        "setup": setup,
        "tests": tests,
        "names": names,
    }
    return Cases(mode="tests", entry=entry, work=work, expected=[])


def names_read(sources: list[str]) -> list[str]:
    """Return the names that tests without an entry point read from the program.

    Builtin names are included only if there is no other name (MBPP has a task whose function is
    `sum`). A name of which only attributes are read (`math.isclose`) counts as a module.
    """
    python_sources = filter(is_python, sources)
    nodes = [node for source in python_sources for node in ast.walk(ast.parse(source))]
    attribute_bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    variables = [
        node for node in nodes if isinstance(node, ast.Name) and id(node) not in attribute_bases
    ]
    used = {variable.id for variable in variables}
    defined = {getattr(node, "name", "") for node in nodes}
    defined |= {variable.id for variable in variables if isinstance(variable.ctx, ast.Store)}
    read = used - defined
    without_builtins = read - {*dir(builtins)}
    return sorted(without_builtins or read)


def without_classes(source: str) -> tuple[str, list[str]]:
    """Return a source without its top-level classes, and the names of these classes."""
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    tree.body = [node for node in tree.body if node not in classes]
    return ast.unparse(tree), [node.name for node in classes]


def program(completion: str, prompt: str, entry: str) -> str:
    """Return the program in a completion.

    A prompt may be code that ends with the head of a function, as in HumanEval. Then the code
    before that function is part of the program, and a completion that does not define the function
    is its body.

    Args:
        completion: The agent's text. Its last fenced block counts, or all of it without one.
        prompt: The prompt's text.
        entry: Name of the tested function; "" for none.
    """
    code = fenced(completion)
    code_before_entry, head = head_of(prompt, entry)
    name = re.escape(entry)
    definition = rf"^(?:(?:async )?def|class) {name}\b|^{name} *="
    if not re.search(definition, code, re.MULTILINE):
        return head + code
    if code_before_entry and is_python(code_before_entry):
        return f"{code_before_entry}\n{code}"
    return code


def fenced(markdown: str) -> str:
    """Return the last fenced block of a text; the whole text if there is none."""
    blocks = FENCE.findall(markdown)
    return blocks[-1] if blocks else markdown


def head_of(prompt: str, entry: str) -> tuple[str, str]:
    """Return the code of a prompt before the function `entry`, and all of its code.

    Both are "" if the prompt does not define the function.
    """
    if not entry:
        return "", ""
    head = fenced(prompt)
    begin = head.find(f"def {entry}(")
    if begin < 0:
        return "", ""
    return head[:begin], head


@lru_cache(1024)
def is_python(source: str) -> bool:
    """Return whether a text is valid Python."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
