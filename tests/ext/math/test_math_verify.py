"""The maths reward: verdicts, the equivalent short cut for integers, and killed processes.

See test_answers.py for the answer of a completion that counts."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arealite.api.reward import RewardConfig, Score, make_reward
from arealite.base.errors import RewardTimeout, failure_class
from arealite.ext.math import math_verify as rewards
from arealite.ext.math.checker import is_equal
from arealite.ext.math.math_verify import (
    BadTruth,
    Checker,
    CheckerCrash,
    MathVerifyReward,
    equal_integers,
)
from arealite.ext.math.reward_options import MathVerifyConfig
from tests.waiting import has_exited, until_exited

ENDLESS = (
    "$9^{9^{9^{9}}}$",
    "\\boxed{9^{9^{9}}}",
    "\\boxed{(10^9)!}",
    "9^9^9^9^9",
    "$" + "(" * 3000 + "x" + ")" * 3000 + "$",
)
ROOT = "\\sqrt{2}"
"""A truth that is not a number, so answers are compared by math-verify."""


SOURCE = Path(rewards.COMMAND[-1]).read_text()


@pytest.fixture
async def reward():
    made = MathVerifyReward(MathVerifyConfig(workers=1, timeout_s=600.0))
    await made.check("x/2", "x/2")  # loads math-verify
    yield made
    await made.close()


def family(reward: MathVerifyReward) -> list[psutil.Process]:
    """Return every process of a reward, children first."""
    parents = [psutil.Process(c._process.pid) for c in reward.checkers if c._process]
    return [child for p in parents for child in p.children(recursive=True)] + parents


# ---------------------------------------------------------------- verdicts


VERDICTS = [
    ("123456", "123456", 1.0),
    (" 123456\n", "123456", 1.0),
    ("123465", "123456", 0.0),
    ("", "123456", 0.0),
    ("no idea", "3", 0.0),
    ("so the answer is $\\frac{1}{2}$", "0.5", 1.0),
    ("first 3, then \\boxed{4}", "4", 1.0),
    ("first 4, then \\boxed{3}", "4", 0.0),
    ("x is 3. Or rather 4", "4", 1.0),
    ("$(x+1)^2$", "x^2+2x+1", 1.0),
    ("answer: 1,234", "1234", 1.0),
    ("it is $\\sqrt{2}$", "$\\sqrt{2}$", 1.0),
    ("+42", "42", 1.0),
    ("1\\,000", "1000", 1.0),
    ("1" * 5000, "1" * 5000, 1.0),
    ("1" * 5000, "1" * 4999 + "2", 0.0),
    ("it is $\\sqrt{4}$", "$\\sqrt{2}$", 0.0),
    ('"quotes" \n and \u2028 newlines 5', "5", 1.0),
    ("x" * 300_000 + " 5", "5", 1.0),
]


async def test_verdicts_of_known_pairs(reward):
    for completion, truth, due in VERDICTS:
        assert await reward.score(completion, truth) == due, (completion[-80:], truth)


def test_default_reward_is_math_verify():
    made = make_reward(RewardConfig())
    assert isinstance(made, MathVerifyReward)


# ---------------------------------------------------------------- the short cut

integer = st.from_regex(r"[-+]?[0-9]{1,70}", fullmatch=True)
padded = st.builds(
    "{}{}{}".format, st.sampled_from(["", " ", "\n", "\u00a0"]), integer, st.just("")
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.tuples(padded, padded), padded.map(lambda text: (text, text.strip()))))
def test_short_cut_agrees_with_the_checker(pair):
    decided = equal_integers(*pair)
    assert decided is None or decided == is_equal(*pair)


@pytest.mark.parametrize("zeros", ["", "0", "000"])
@pytest.mark.parametrize("sign", ["", "-", "+"])
def test_short_cut_agrees_on_zeros_and_signs(zeros, sign):
    for completion in (f"{sign}{zeros}7", f"{sign}{zeros}", "7", "-7", "0"):
        for truth in (f"{sign}{zeros}7", "7", "-7", "0"):
            decided = equal_integers(completion, truth)
            assert decided is None or decided == is_equal(completion, truth), (completion, truth)


@pytest.mark.parametrize("text", ["+ 5", "1,000", "5.", "5 6", "٣", "5%", "1" * 65, ""])
def test_short_cut_is_undecided_for_other_formats(text):
    assert equal_integers(text, "5") is None
    assert equal_integers("5", text) is None


async def test_short_cut_needs_no_process():
    reward = MathVerifyReward(MathVerifyConfig())
    assert await reward.score("007", "7") == 1.0
    assert reward.checkers[0]._process is None


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("answer", ENDLESS)
async def test_answer_that_uses_up_the_cpu_seconds_scores_0_and_is_counted(reward, answer):
    child, _ = family(reward)
    reward.timeout_s = 0.5
    score = await reward.score(answer, ROOT)
    assert (score, score.parts) == (0.0, {"unchecked": 1.0})
    until_exited(child)
    reward.timeout_s = 600.0
    assert await reward.score("$x/2$", "x/2") == 1.0
    assert len(family(reward)) == 2


async def test_non_numeric_answer_to_an_integer_truth_scores_0_without_a_check(reward):
    assert [await reward.score(answer, "5") for answer in ENDLESS] == [0.0] * len(ENDLESS)


async def test_check_of_a_checker_without_cpu_time_is_repeated(reward, monkeypatch):
    child, _ = family(reward)
    child.send_signal(signal.SIGSTOP)
    said: list[bool | str | None] = []
    ask = Checker.ask

    async def patient(self: Checker, *question: Any) -> bool | str | None:
        said.append(await ask(self, *question))
        reward.patience_s = 600.0
        return said[-1]

    monkeypatch.setattr(Checker, "ask", patient)
    reward.patience_s = 0.1
    assert await reward.score("1/2", "0.5") == 1.0
    assert said == ["waited", True]
    assert has_exited(child)


async def test_episode_fails_if_checkers_get_no_cpu_time(reward):
    reward.patience_s = 0.0
    with pytest.raises(RewardTimeout, match=r"a check got no CPU for 0\.0 s, 3 times") as caught:
        await reward.score("$9^{9^{9^{9}}}$", ROOT)
    assert failure_class(caught.value) == "reward_timeout"


class ScriptedChecker(Checker):
    """A checker with scripted answers."""

    def __init__(self, *answers: bool | str | None) -> None:
        super().__init__()
        self.answers = [*answers]
        self.asked: list[str] = []

    async def ask(
        self, completion: str, truth: str, cpu_s: float, wait_s: float
    ) -> bool | str | None:
        self.asked.append(completion)
        return self.answers.pop(0)


def scripted_reward(*answers: bool | str | None) -> tuple[MathVerifyReward, ScriptedChecker]:
    reward = MathVerifyReward(MathVerifyConfig(workers=1, timeout_s=1.0))
    checker = ScriptedChecker(*answers)
    reward._free.get_nowait()
    reward._free.put_nowait(checker)
    return reward, checker


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        (["waited", "killed", True], True),
        (["crashed", False], False),
        (["cpu", False], None),
        (["crashed", "crashed", True], None),
        (["crashed", "killed", True], True),
    ],
)
async def test_only_cpu_timeout_and_a_second_crash_count_against_the_answer(answers, verdict):
    reward, checker = scripted_reward(*answers)
    assert await reward.check("x", "y") is verdict
    assert not checker.answers


@pytest.mark.parametrize("said", ["cpu", "crashed"])
async def test_truth_that_fails_every_comparison_raises_bad_truth(said):
    times = 1 if said == "cpu" else 2
    reward, checker = scripted_reward(*[said] * times * 2)
    with pytest.raises(BadTruth, match="ground_truth='y'") as caught:
        await reward.check("x", "y")
    assert failure_class(caught.value) == "reward_truth"
    assert checker.asked == ["x"] * times + ["\\boxed{0}"] * times


@pytest.mark.parametrize("truth", ["", "  ", "\\boxed{}"])
async def test_truth_without_an_answer_raises_bad_truth(reward, truth):
    with pytest.raises(BadTruth):
        await reward.score("3", truth)


@pytest.mark.parametrize("kind", ["segfault", "recursion", "memory", "exit"])
async def test_answer_that_crashes_the_checker_twice_scores_0_and_is_counted(
    tmp_path, monkeypatch, kind
):
    """No answer that crashes a checker is known, so a patched checker crashes at one word."""
    crash = {
        "segfault": "os.kill(os.getpid(), signal.SIGSEGV)",
        "recursion": "raise RecursionError",
        "memory": "bytearray(MEMORY_BYTES)",
        "exit": "os._exit(0)",
    }[kind]
    head = "    marked_truth = marked(truth)\n"
    assert SOURCE.count(head) == 1
    planted = tmp_path / "checker.py"
    planted.write_text(SOURCE.replace(head, f"{head}    if 'crash' in completion: {crash}\n"))
    monkeypatch.setattr(rewards, "COMMAND", (*rewards.COMMAND[:-1], str(planted)))
    reward = MathVerifyReward(MathVerifyConfig(timeout_s=600.0))
    await reward.setup()
    try:
        score = await reward.score("crash", ROOT)
        assert isinstance(score, Score)
        assert (score, score.parts) == (0.0, {"unchecked": 1.0})
        assert await reward.score("1/2", "0.5") == 1.0
    finally:
        await reward.close()


async def test_checker_loads_math_verify_for_the_first_answer_that_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loads = tmp_path / "loads"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def note(event, found):\n"
        "    if event == 'import' and found[0] == 'math_verify':\n"
        f"        print(os.getpid(), file=open({str(loads)!r}, 'a'))\n"
        "sys.addaudithook(note)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reward = MathVerifyReward(MathVerifyConfig(timeout_s=600.0))
    await reward.setup()
    try:
        assert await reward.score("#### 0.5", "1/2") == 1.0
        assert await reward.score("2.5 or 3", "2.5") == 0.0
        assert not loads.exists()
        assert await reward.score("\\boxed{2x}", "x + x") == 1.0
        assert await reward.score("\\boxed{0.5}", "1/2") == 1.0
        checker = reward.checkers[0]._process
        assert checker is not None
        assert loads.read_text().split() == [str(checker.pid)]
    finally:
        await reward.close()


def test_score_is_a_float_with_parts():
    assert Score(0.5, unchecked=1) == 0.5
    assert Score(0.5, unchecked=1).parts == {"unchecked": 1}


async def test_cancelled_check_is_killed_and_its_answer_never_reaches_the_next(reward):
    child, _ = family(reward)
    check = asyncio.ensure_future(reward.score("$9^{9^{9^{9}}}$", ROOT))
    done, _ = await asyncio.wait([check], timeout=0.2)
    assert not done
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    until_exited(child)
    assert await reward.score("1/2", "1/3") == 0.0


@pytest.mark.parametrize("victim", [0, 1], ids=["child", "parent"])
async def test_dead_worker_is_restarted_and_its_check_repeated(reward, victim):
    before = family(reward)
    before[victim].kill()
    until_exited(before[victim])
    assert await reward.score("1/2", "0.5") == 1.0
    after = family(reward)
    assert len(after) == 2
    assert not {p.pid for p in after} & {before[0].pid}


def test_dead_worker_is_restarted_under_uvloop():
    async def check() -> bool | None:
        reward = MathVerifyReward(MathVerifyConfig(workers=1, timeout_s=600.0))
        await reward.setup()
        parent = family(reward)[-1]
        parent.kill()
        assert reward.checkers[0]._process is not None
        await reward.checkers[0]._process.wait()
        equal = await reward.check("1/2", "0.5")
        await reward.close()
        return equal

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(check())
    gc.collect()


async def test_check_whose_worker_is_killed_is_repeated_then_fails_the_episode(reward):
    check = asyncio.ensure_future(reward.score("$9^{9^{9^{9}}}$", ROOT))
    killed: list[int] = []
    async with asyncio.timeout(60):
        while not check.done():
            for child in family(reward)[:-1]:
                if child.pid not in killed and not has_exited(child):
                    killed.append(child.pid)
                    child.kill()
            await asyncio.wait([check], timeout=0.01)
    with pytest.raises(CheckerCrash):
        await check
    assert len(killed) == rewards.TRIES
    assert await reward.score("1/2", "0.5") == 1.0


async def test_close_leaves_no_process():
    reward = MathVerifyReward(MathVerifyConfig(workers=2, timeout_s=600.0))
    await reward.setup()
    processes = family(reward)
    assert len(processes) == 4
    busy = asyncio.ensure_future(reward.check("$9^{9^{9^{9}}}$", "x/2"))
    await asyncio.wait([busy], timeout=0.1)
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await reward.close()
    until_exited(*processes)


async def test_checks_run_in_parallel_and_keep_their_answers():
    reward = MathVerifyReward(MathVerifyConfig(workers=2, timeout_s=600.0))
    await reward.setup()
    try:
        checks = [reward.check(f"it is ${n}/7$", f"\\frac{{{n - n % 2}}}{{7}}") for n in range(40)]
        assert await asyncio.gather(*checks) == [n % 2 == 0 for n in range(40)]
    finally:
        await reward.close()


@pytest.mark.processes
async def test_death_of_the_owner_ends_the_workers(tmp_path):
    code = """
import asyncio, psutil
from arealite.ext.math.reward_options import MathVerifyConfig
from arealite.ext.math.math_verify import MathVerifyReward
async def main():
    reward = MathVerifyReward(MathVerifyConfig(workers=1, timeout_s=600.0))
    await reward.check("x/2", "x/2")  # loads math-verify
    busy = asyncio.ensure_future(reward.check("$9^{9^{9^{9}}}$", "x/2"))
    await asyncio.wait([busy], timeout=0.1)
    parent = psutil.Process(reward.checkers[0]._process.pid)
    print(parent.pid, parent.children()[0].pid, flush=True)
    await busy
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in (await owner.stdout.readline()).split()]
    owner.kill()
    await owner.wait()
    until_exited(*workers)
