"""Programs scored by cases: kinds of rows, partial credit, faulty programs and cheats."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

import pytest

from arealite.base.errors import UserError, failure_class
from arealite.ext.code.config import CodeEnvConfig
from arealite.ext.code.env import BrokenTests, CodeEnv, Verdict, program, read_cases
from arealite.ext.code.json_values import close, decode, encode, same, same_text
from arealite.ext.sandbox.config import SandboxConfig, SandboxFailed
from tests.ext.games.players import Player, task

CASE_S, LONG_S = 60.0, 200.0
"""Time limit of cases and programs that must end by themselves, also on a busy machine."""
CALLS = {"entry_point": "f", "cases": [{"args": [x], "expected": x + 1} for x in range(4)]}
STDIO = {"cases": [{"stdin": f"{x}\n", "stdout": f"{2 * x}\n"} for x in range(3)]}
CHECK = {
    "entry_point": "total",
    "test": "METADATA = {'author': 'us'}\n\ndef check(candidate):\n"
    "    assert candidate([1, 2]) == 3, 'two'\n    for n in range(3):\n"
    "        assert candidate([n]) == n\n    assert abs(candidate([0.1, 0.2]) - 0.3) < 1e-6\n",
}
HEAD = "from typing import List\n\n\ndef total(of: List[float]) -> float:\n    '''The sum.'''\n"
ASSERTS = {
    "setup": "import math",
    "test_list": [
        "assert twice(2) == 4",
        "assert math.isclose(twice(1.5), 3)",
        "p = Pair(1, 2)\nassert area([p, Pair(3, 4)]) == 14 and p.x == 1",
        "assert twice('a') == 'aa'",
    ],
}
PAIRS = (
    "class Pair:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
    "def area(pairs): return sum(p.x * p.y for p in pairs)\n"
)


async def sandboxed(**options: Any) -> CodeEnv:
    """An environment with the best sandbox of this host; the tests check verdicts."""
    for backend in ("bwrap", "unsafe"):
        sandbox = SandboxConfig(backend=backend, timeout_s=LONG_S)
        made = CodeEnv(None, CodeEnvConfig(sandbox=sandbox, case_timeout_s=CASE_S, **options))
        try:
            await made.setup()
            break
        except UserError:
            continue
    return made


@pytest.fixture
async def env():
    made = await sandboxed()
    yield made
    await made.close()


async def verdict(env: CodeEnv, text: str, info: Any, *, prompt: str = "?", case_s: float = CASE_S):
    cases = read_cases(task(prompt, **info), case_s)
    return await env.judge(program(text, prompt, cases.entry), cases)


# ---------------------------------------------------------------- kinds of rows


@pytest.mark.parametrize(
    ("info", "text", "passed", "total"),
    [
        (CALLS, "def f(x): return x + 1", 4, 4),
        (CALLS, "f = lambda x: x + 1", 4, 4),
        (CALLS, "Like this:\n```python\ndef f(x):\n    return x + 1\n```\nDone.", 4, 4),
        (CALLS, "```py\nprint(1)\n```\nor\n```\ndef f(x):\n    return x + 1", 4, 4),
        (CALLS, "def f(x): return 1", 1, 4),
        (CALLS, "def f(x): return str(x + 1)", 0, 4),
        (CALLS, "def f(x):\n    if x == 2: raise ValueError\n    return x + 1", 3, 4),
        (CALLS, "def f(x):\n    print('noise')\n    return x + 1", 4, 4),
        (CALLS, "if __name__ == '__main__':\n    def f(x): return x + 1", 4, 4),
        (STDIO, "print(int(input()) * 2)", 3, 3),
        (STDIO, "print(2 * int(open(0).read()), end='')", 3, 3),
        (STDIO, "import sys\nsys.stdout.write(str(int(sys.stdin.readline()) * 2))\nexit()", 3, 3),
        (STDIO, "n = int(input())\nprint(0 if n == 1 else 2 * n)", 2, 3),
        (STDIO, "print(int(input()) * 2)\nraise SystemExit(3)", 0, 3),
        (STDIO, "print(1 / int(input()))", 0, 3),
        (CHECK, "def total(of): return sum(of)", 5, 5),
        (CHECK, "def total(of): return 3", 1, 5),
        (CHECK, "def total(of): return of[5]", 0, 3),  # the number of asserts in a loop is unknown
        (ASSERTS, f"def twice(x): return 2 * x\n{PAIRS}", 4, 4),
        (ASSERTS, "def twice(x): return 2 * x", 3, 4),
    ],
)
async def test_programs_get_their_verdicts(env, info, text, passed, total):
    found = await verdict(env, text, info)
    if info is CHECK and passed == 0:
        assert (found.passed, found.is_loaded) == (0, True)
    else:
        assert found == Verdict(passed, total, True)


@pytest.mark.parametrize(
    "info", [CALLS, STDIO, CHECK, ASSERTS], ids=["call", "io", "check", "mbpp"]
)
async def test_program_that_does_not_load_is_not_loaded(env, info):
    for text in ("def f(:", "((((" * 1000, "\0", "```python\n1 +\n```"):
        found = await verdict(env, text, info)
        assert (found.passed, found.is_loaded) == (0, False), text


async def test_program_without_the_function_is_not_loaded(env):
    for text in ("", "x = 1", "import nothing_of_this_name", "1 / 0", "import sys\nsys.exit(0)"):
        assert await verdict(env, text, CALLS) == Verdict(0, 4, False), text


async def test_endless_case_fails_only_itself(env):
    """The endless cases run concurrently, because each takes its whole time limit."""
    one = "import time\ndef f(x):\n    while x == 1: time.sleep(0.1)\n    return x + 1"
    two = "import time\ndef twice(x):\n    while x == 2: time.sleep(0.1)\n    return 2 * x\n"
    judged = verdict(env, one, CALLS, case_s=8.0), verdict(env, two + PAIRS, ASSERTS, case_s=8.0)
    assert await asyncio.gather(*judged) == [Verdict(3, 4, True)] * 2
    text = "n = int(input())\nwhile n == 1: print('x' * 99)\nprint(2 * n)"
    assert await verdict(env, text, STDIO) == Verdict(2, 3, True)


async def test_crash_fails_only_its_case(env):
    for crash in ("os._exit(0)", "os.abort()", "os.kill(os.getpid(), 9)", "f(x)"):
        text = f"import os\ndef f(x):\n    if x == 1: {crash}\n    return x + 1"
        assert await verdict(env, text, CALLS) == Verdict(3, 4, True), crash


async def test_large_input(env):
    text = "print(len(input()))"
    info = {"cases": [{"stdin": "x" * 500_000 + "\n", "stdout": "500000"}] * 2}
    assert await verdict(env, text, info) == Verdict(2, 2, True)


VALUES = [
    (None, None),
    ((1, 2), [1, 2]),
    ([(1, "a")], [[1, "a"]]),
    ({1: [2]}, {"1": [2]}),
    ({3, 1}, [1, 3]),
    (float("nan"), float("nan")),
    (0.1 + 0.2, 0.3),
    (10**40, 10**40),
    (True, True),
    (float("inf"), float("inf")),
    ("\ud800é", "\ud800é"),
]


async def test_values_are_compared_by_type_and_tolerance(env):
    info = {"entry_point": "f", "cases": [{"expected": due} for _, due in VALUES]}
    text = f"from math import nan, inf\nvalues = iter({[got for got, _ in VALUES]!r})\ndef f(): "
    assert await verdict(env, text + "return next(values)", info) == Verdict(11, 11, True)


async def test_keyword_arguments_and_missing_keys_are_accepted(env):
    """In rows of Parquet files, missing keys of a case are None."""
    case = {"args": None, "kwargs": {"x": 2}, "expected": 3, "stdin": None, "stdout": None}
    info = {"entry_point": "f", "cases": [case], "test": None, "test_list": None, "setup": None}
    assert await verdict(env, "def f(x): return x + 1", info) == Verdict(1, 1, True)


# ---------------------------------------------------------------- HumanEval's prompts


@pytest.mark.parametrize(
    "text",
    [
        "    return sum(of)\n",
        "def total(of: List[float]): return sum(of)",
        "```python\ndef total(of: List[float]) -> float:\n    return sum(of)\n```",
        "```python\nfrom typing import List\n\ndef total(of: List[float]): return sum(of)\n```",
    ],
)
async def test_code_of_the_prompt_is_part_of_the_program(env, text):
    chat = f"Complete this function.\n```python\n{HEAD}```\n"
    for prompt in (HEAD, chat):
        if prompt is chat and text.startswith(" "):
            continue
        assert (await verdict(env, text, CHECK, prompt=prompt)) == Verdict(5, 5, True)


async def test_code_of_the_question_is_used_if_the_prompt_begins_the_answer(env):
    chat = [{"role": "user", "content": HEAD}, {"role": "assistant", "content": "```python\n"}]
    assert task(chat).text == HEAD
    text = "```python\ndef total(of: List[float]) -> float:\n    return sum(of)\n```"
    player = Player([text])
    await env.run(task(chat, **CHECK), agent=player)
    assert player.parts["solved"] == 1.0


async def test_helpers_of_the_prompt_can_be_used_by_tests(env):
    prompt = (
        "def poly(xs, x):\n    return sum(a * x**n for n, a in enumerate(xs))\n\ndef root(xs):\n"
    )
    check = "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4\n"
    info = {"entry_point": "root", "test": check}
    assert await verdict(env, "    return -xs[0] / xs[1]", info, prompt=prompt) == (1, 1, True)
    assert await verdict(env, "def root(xs): return -0.5", info, prompt=prompt) == (1, 1, True)
    forged = "def poly(xs, x): return 0\ndef root(xs): return 1"
    assert await verdict(env, forged, info, prompt=prompt) == (0, 1, True)


async def test_classes_of_the_prompt_belong_to_the_program(env):
    prompt = "class Node:\n    def __init__(self, x): self.x = x\n\ndef value(node):\n"
    check = "def check(candidate):\n    assert candidate(Node(3)) == 3\n"
    info = {"entry_point": "value", "test": check}
    assert await verdict(env, "    return node.x", info, prompt=prompt) == (1, 1, True)


# ---------------------------------------------------------------- cheating

ANYTHING = (
    "class Any(int):\n    def __eq__(self, other): return True\n"
    "    def __hash__(self): return 0\n    def __abs__(self): return 0.0\n"
    "    def __sub__(self, other): return self\n    def __lt__(self, other): return True\n"
)
CHEATS = {
    "print the verdict": "import os\ndef {f}(x):\n    for n in range(9):\n"
    '        os.write(n, b\'{{"case": 0, "value": 1, "passed": 99, "of": 1}}\\n\') '
    "if n not in (3, 4) else None\n",
    "write into every file": "import os\ndef {f}(x):\n    for n in range(64):\n"
    '        try: os.write(n, b\'{{"value": 1, "case": 0, "passed": 9, "of": 9}}\\n\' * 9)\n'
    "        except OSError: pass\n",
    "answer before being asked": "import os\nfor n in range(64):\n"
    '    try: os.write(n, b\'{{"loaded": {{"{f}": {{"handle": 0}}}}}}\\n\' * 99 + '
    "b'{{\"value\": true}}\\n' * 99)\n"
    "    except OSError: pass\ndef {f}(x): pass\n",
    "say that it ended": "import os\nfor n in range(64):\n"
    '    try: os.write(n, b\'{{"ended": 0}}\\n{{"pid": 1}}\\n\')\n'
    "    except OSError: pass\ndef {f}(x): pass\n",
    "load as no value": "import os\nfor n in range(3, 64):\n"
    '    try: os.write(n, b\'{{"loaded": {{"{f}": {{"eval": 0}}}}}}\\n\')\n'
    "    except OSError: pass\ndef {f}(x): return 77\n",
    "load as nothing": "import os\nfor n in range(3, 64):\n"
    "    try: os.write(n, b'{{\"loaded\": {{}}}}\\n')\n"
    "    except OSError: pass\ndef {f}(x): return 77\n",
    "answers that are cut off": "def {f}(x): return '}}' * 200_000\n",
    "interrupt its parents": "import os, signal\nfor pid in range(os.getpid() - 1, 1, -1):\n"
    "    try: os.kill(pid, signal.SIGINT)\n    except OSError: pass\ndef {f}(x): return 77\n",
    "equal to all": ANYTHING + "def {f}(x): return Any()\n",
    "equal to all, and no number": ANYTHING.replace("(int)", "") + "def {f}(x): return Any()\n",
    "leave": "import sys\ndef {f}(x): sys.exit(0)\n",
    "leave at once": "import os\ndef {f}(x): os._exit(0)\n",
    "patch builtins": "import builtins\nfor name in ('abs', 'all', 'any', 'isinstance', 'len'):\n"
    "    setattr(builtins, name, lambda *a: True)\nbuiltins.AssertionError = ()\n"
    "builtins.Exception = ()\ndef {f}(x): return 77\n",
    "patch json": "import json\nreal = json.dumps\n"
    'json.dumps = lambda *a, **k: \'{{"value": true, "passed": 9}}\'\ndef {f}(x): return 77\n',
    "search frames and garbage": "import gc, sys\nfound = []\n"
    "frame = sys._getframe()\nwhile frame:\n"
    "    found.append(repr(frame.f_locals) + repr(frame.f_globals)); frame = frame.f_back\n"
    "def {f}(x):\n    everything = ' '.join(found) + repr(gc.get_objects())\n"
    "    secret = '-'.join(('expected', 'secret'))\n"  # no constant: the program could find it
    "    return secret if secret in everything else 77\n",
    "search memory": "import ctypes, re\nctypes.CDLL(None).prctl(4, 1, 0, 0, 0)\ndef {f}(x):\n"
    "    areas = [line.split() for line in open('/proc/self/maps')]\n"
    "    with open('/proc/self/mem', 'rb', 0) as memory:\n        for area in areas:\n"
    "            begin, end = (int(n, 16) for n in area[0].split('-'))\n"
    "            try: text = memory.seek(begin) and memory.read(end - begin)\n"
    "            except (OSError, OverflowError): continue\n"
    "            found = re.search(b'expected[-]secret', text)\n"
    "            if found: return found[0].decode()\n    return 77\n",
    "read its parents' files": "import glob\ndef {f}(x):\n"
    "    for path in glob.glob('/proc/[0-9]*/fd/*') + glob.glob('/proc/[0-9]*/mem'):\n"
    "        try:\n            if 'expected-secret' in open(path, errors='replace').read(9999): "
    "return 'expected-secret'\n        except (OSError, ValueError): pass\n    return 77\n",
    "kill its parents": "import os, signal\nfor pid in range(os.getpid() - 1, 1, -1):\n"
    "    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\ndef {f}(x): return 77\n",
    "recursion": "def {f}(x): return {f}(x)\n",
    "recursion in its answer": "def {f}(x):\n    y = []\n    y.append(y)\n    return y\n",
    "an answer too deep": "def {f}(x):\n    y = []\n"
    "    for _ in range(99999): y = [y]\n    return y\n",
    "an answer too large": "def {f}(x): return 'x' * 10**8\n",
    "never end": "import time\ndef {f}(x): time.sleep(60)\n",
}
SECRETS = {
    "call": {"entry_point": "f", "cases": [{"args": [1], "expected": "expected-secret"}] * 2},
    "check": {
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate(1) == 'expected-secret'\n"
        "    assert candidate(1) == 'expected-secret'\n",
    },
    "asserts": {"test_list": ["assert f(1) == 'expected-secret'", "assert abs(f(1) - 5) < 1"]},
}


@pytest.mark.parametrize("kind", SECRETS)
async def test_cheats_pass_no_case(env, kind):
    """No cheat passes a case without its answer, or affects other programs."""
    if env.sandbox.config.backend == "unsafe":
        pytest.skip("without a sandbox programs may look into each other")
    texts = [text.format(f="f") for text in CHEATS.values()]
    found = await asyncio.gather(*(verdict(env, text, SECRETS[kind], case_s=1.0) for text in texts))
    for name, each in zip(CHEATS, found, strict=True):
        assert each.passed == 0, (name, each)
        assert each.total == 2 or not each.is_loaded, (name, each)
    honest = "def f(x): return 'expected-secret'"
    assert (await verdict(env, honest, SECRETS[kind])).passed == (1 if kind == "asserts" else 2)


async def test_printed_reports_pass_no_case(env):
    assert await verdict(env, 'print(\'{"case": 0, "code": 0}\')', STDIO) == Verdict(0, 3, True)
    assert await verdict(env, "while True: print('x' * 99)", STDIO, case_s=CASE_S) == (0, 3, True)


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("text", "options", "reward"),
    [
        ("def f(x): return x + 1", {}, 2.0),
        ("def f(x): return 1", {}, 0.25),
        ("def f(x): return 0", {}, 0.0),
        ("def f(x", {}, -0.5),
        ("def f(x): return x + 1", {"partial": False}, 1.0),
        ("def f(x): return 1", {"partial": False}, 0.0),
        ("def f(x): return x + 1", {"bonus": 0.0}, 1.0),
        ("def f(x", {"error_reward": 0.0}, 0.0),
    ],
)
async def test_verdicts_give_the_configured_rewards(text, options, reward):
    env = await sandboxed(**options)
    player = Player([text])
    await env.run(task("f adds one", **CALLS), agent=player)
    assert player.rewards == [reward]
    assert set(player.parts) == {"passed", "solved", "loaded"}
    assert player.parts["loaded"] == (text != "def f(x")
    assert player.record.seconds_scoring > 0


async def test_rows_without_cases_fail_before_generating(env):
    for info in ({}, {"entry_point": "f"}, {"cases": [{"args": [1], "expected": 1}]}):
        player = Player(["x"])
        with pytest.raises(BrokenTests, match="no test cases") as caught:
            await env.run(task("?", **info), agent=player)
        assert failure_class(caught.value) == "code_tests"
        assert not player.seen


@pytest.mark.parametrize(
    "tests",
    [["assert f("], ["import nothing_of_this_name\nassert f(1)"], ["assert f(lambda: 1)"]],
    ids=["syntax", "import", "function"],
)
async def test_broken_tests_give_no_reward(env, tests):
    player = Player(["def f(x): return x"])
    with pytest.raises(BrokenTests):
        await env.run(task("?", test_list=tests), agent=player)
    assert player.rewards == [0.0]


async def test_program_cannot_make_its_tests_look_broken(env):
    for text in ("import nothing_of_this_name", "raise ImportError", "raise SyntaxError"):
        text = f"def f(x):\n    {text}"
        assert await verdict(env, text, {"test_list": ["assert f(1)"]}) == Verdict(0, 1, True)


async def test_failed_sandbox_gives_no_reward(env, monkeypatch):
    monkeypatch.setattr(env.sandbox, "command", ["/nonexistent"])
    player = Player(["def f(x): return x"])
    with pytest.raises(SandboxFailed):
        await env.run(task("?", **CALLS), agent=player)
    assert player.rewards == [0.0]


# ---------------------------------------------------------------- generated rows, values


async def test_generated_rows_can_be_solved(env):
    rows = list(islice(CodeEnv.rows(env.config, split="train", seed=1), 12))
    again = list(islice(CodeEnv.rows(env.config, split="train", seed=1), 12))
    other = list(islice(CodeEnv.rows(env.config, split="eval", seed=1), 12))
    assert rows == again != other
    for row in rows:
        found = await verdict(env, row["ground_truth"], row["extra_info"], prompt=row["prompt"])
        assert found == Verdict(5, 5, True), row


def test_values_are_encoded_and_decoded():
    values = [
        1,
        "x",
        2.5,
        None,
        True,
        [1, (2, 3)],
        {"a": {1, 2}},
        {(1, 2): b"\0"},
        1j,
        range(1, 9, 2),
    ]
    for value in values:
        assert decode(encode(value, id), lambda _: None) == value
    thing = object()
    assert decode(encode([thing], lambda each: 7), lambda number: (number,)) == [(7,)]


@pytest.mark.parametrize("data", [{"eval": 1}, {"dict": 3}, {"bytes": "x"}, {"a": 1, "b": 2}])
def test_invalid_data_is_refused(data):
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(data, lambda _: None)


def test_expected_values_match_results_of_equal_value():
    assert same({1: (2.0,)}, {"1": [2]}, 1e-6)
    assert not same([1, 2], [2, 1], 1e-6)
    assert not same({"a": 1}, {"a": 1, "b": 2}, 1e-6)
    assert not same("1", 1, 1e-6)
    assert not same(object(), 1.0, 1e-6)
    assert close(1.0000001, 1, 1e-6)
    assert not close(1.1, 1, 1e-6)
    assert not close(True, 1.0, 1e-6)
    assert same_text("1 2.0000001\n\n", "1  2.0\n", 1e-6)
    assert not same_text("1\n2", "1 2", 1e-6)
    assert not same_text("1", "1.5", 1e-6)
    assert not same_text("nope.", "1.5", 1e-6)
