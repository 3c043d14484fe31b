"""Programs that pretend to be right, or that disturb the process that judges them."""

from __future__ import annotations

import asyncio

import pytest

from arealite.base.errors import UserError
from arealite.ext.code.config import CodeEnvConfig
from arealite.ext.code.env import CodeEnv
from arealite.ext.sandbox.config import SandboxConfig
from tests.ext.code.generated import SHADOWS
from tests.ext.code.test_env import env, verdict  # noqa: F401  (a fixture)

PROMPT = (
    "import math\n\n\ndef double(x):\n    return x * 2\n\n\ndef f(x):\n    '''41.5 a piece.'''\n"
)
CHECK = """
def check(candidate):
    assert True, 'This prints if this assert fails 1 (good for debugging!)'
    assert abs(candidate(1) - 41.5) < 1e-6
    assert math.isclose(candidate(1), 41.5, rel_tol=1e-9)
    assert isinstance(candidate(1), float) and candidate(1) == 41.5
    assert all(map(lambda x, y: candidate(x) == y, [1, 2], [41.5, 83.0]))
    for got, due in zip(map(candidate, [1, 2]), [41.5, 83.0]):
        assert round(got, 6) == due
    assert len({candidate(1), 41.5}) == 1 and sum([candidate(1)]) == 41.5
    assert sorted([candidate(2), candidate(1)]) == [41.5, 83.0]
    assert double(candidate(1)) == 83.0
    assert str(candidate(1)) == '41.5'
    assert max(candidate(1), 0) == 41.5 == min(candidate(1), 99)
    try:
        candidate(-1)
        assert False, 'a negative number of pieces'
    except ValueError:
        pass
    assert 1 + 1 == 2
"""
ROWS = {
    "check": (PROMPT, {"entry_point": "f", "test": CHECK}),
    "list": (
        "41.5 a piece",
        {
            "setup": "import math",
            "test_list": [
                "assert abs(f(1) - 41.5) < 1e-6",
                "assert isinstance(f(2), float) and f(2) == 83.0",
                "assert math.isclose(f(3), 124.5) and str(f(1)) == '41.5'",
                "assert True",
            ],
        },
    ),
    "calls": (
        "41.5 a piece",
        {"entry_point": "f", "cases": [{"args": [x], "expected": 41.5 * x} for x in (1, 2, 3)]},
    ),
}
HONEST = "def f(x):\n    if x < 0: raise ValueError(x)\n    return 41.5 * x\n"
FDS = "import os\ndef tell(text):\n    for n in range(3, 64):\n        try: os.write(n, text)\n"
FDS += "        except OSError: pass\n"
PARENTS = "import os\nparents = range(os.getpid() - 1, 1, -1)\n"
CHEATS = {
    "define what tests call": SHADOWS + "def f(x): return 0.0\n",
    "define what instrumented tests call": "_passed = _failed = _done = candidate = check = lambda "
    "*a: None\nMETADATA = names = verdicts = found = None\ndef f(x): return 0.0\n",
    "define the helper of the prompt": "def double(x): return 83.0\ndef f(x): return 0.0\n",
    "define math": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n"
    "    def __getattr__(self, name): return self.isclose\ndef f(x): return 0.0\n",
    "always raise": "def f(x): raise RuntimeError\n",
    "end loops": "def f(x): raise StopIteration\n",
    "end asynchronous loops": "def f(x): raise StopAsyncIteration\n",
    "end loops by a namesake": "class StopIteration(Exception): pass\n"
    "def f(x): raise StopIteration\n",
    "end generators": "def f(x): raise GeneratorExit\n",
    "nothing to loop over": "def f(x): return []\n",
    "say that a test is broken": "class Unsupported(BaseException): pass\n"
    "def f(x): raise Unsupported('a test cannot be run here')\n",
    "say that a name is missing": "def f(x): raise NameError(\"name 'double' is not defined\")\n",
    "say that a module is missing": "def f(x): raise ModuleNotFoundError('math')\n",
    "an assert of its own": "def f(x): raise AssertionError\n",
    "an exception that lies": "class E(Exception):\n"
    "    __class__ = property(lambda self: ValueError)\n"
    "    def __str__(self): raise self\n    __repr__ = __str__\nE.__name__ = 'Exception'\n"
    "def f(x): raise E\n",
    "a group of exceptions": "def f(x): raise BaseExceptionGroup('all', [KeyboardInterrupt()])\n",
    "broken tests by the pipe": FDS
    + 'def f(x):\n    tell(b\'{"broken": ["x", "y"], "error": ["Unsupported", "no"]}\\n\')\n'
    '    tell(b\'{"error": ["ImportError", "no"], "case": 0, "passed": 9, "of": 9}\\n\')\n',
    "errors of odd kinds": FDS + "def f(x):\n    tell(b'{\"error\": 5}\\n')\n"
    '    tell(b\'{"error": [["a"], {}]}\\n{"value": {"range": [0, 1, 0]}}\\n\')\n',
    "a process id of all": FDS + "if os.fork() == 0:\n    while True: tell(b'{\"pid\": -1}\\n')\n"
    "def f(x): os._exit(1)\n",
    "a child that answers": FDS
    + "if os.fork() == 0:\n    for _ in range(99999): tell(b'{\"value\": true}\\n')\n"
    "def f(x): return 0.0\n",
    "a thread that answers": FDS + "import threading\n"
    'def flood():\n    while True: tell(b\'{"value": {"handle": 0}}\\n\')\n'
    "threading.Thread(target=flood, daemon=True).start()\ndef f(x): return 0.0\n",
    "too deep for a parser": FDS + "def f(x): tell(b'[' * 200_000 + b'\\n')\n",
    "too long a number": FDS + "def f(x): tell(b'{\"value\": ' + b'9' * 9999 + b'}\\n')\n",
    "half a line": FDS + "def f(x):\n    tell(b'{\"value\": ')\n    os._exit(0)\n",
    "close all files": "import os\ndef f(x): os.closerange(0, 256)\n",
    "modules beside the program": "import os\nfor name in ('math', 'ast', 'json', 'select'):\n"
    "    for folder in ('.', '/tmp', '/dev/shm', os.path.dirname(os.__file__)):\n"
    "        try:\n            with open(f'{folder}/{name}.py', 'w') as file:\n"
    "                file.write('isclose = walk = loads = select = lambda *a, **k: True')\n"
    "        except OSError: pass\ndef f(x): return 0.0\n",
    "write into its parents' files": PARENTS + "def f(x):\n    for pid in [*parents, 1]:\n"
    "        for n in range(64):\n            try:\n"
    "                with open(f'/proc/{pid}/fd/{n}', 'wb', 0) as file:\n"
    '                    file.write(b\'{"case": 0, "passed": 9, "of": 9}\\n\')\n'
    "            except OSError: pass\n    return 0.0\n",
    "read what it finds": "import glob, re\nplaces = '/proc/[0-9]*/fd/*', '/proc/[0-9]*/cmdline', "
    "'/proc/[0-9]*/environ', '/tmp/*', '/dev/shm/*', '/dev/stdin'\ndef f(x):\n"
    "    for place in places:\n        for path in glob.glob(place):\n            try:\n"
    "                with open(path, errors='replace') as file:\n"
    "                    if found := re.search(r'41[.]5', file.read(99999)):\n"
    "                        return float(found[0]) * x\n"
    "            except (OSError, ValueError): pass\n    return 0.0\n",
    "limits for its parents": PARENTS + "import resource\nfor pid in parents:\n"
    "    for which in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU):\n"
    "        try: resource.prlimit(pid, which, (1, 1))\n"
    "        except (OSError, ValueError): pass\n"
    "def f(x): return 0.0\n",
    "signals for its parents": PARENTS + "import signal\nfor pid in parents:\n"
    "    for which in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGHUP):\n"
    "        try: os.kill(pid, which)\n        except OSError: pass\ndef f(x): return 0.0\n",
    "no process left": "import os, time\ntry:\n    while True:\n"
    "        if os.fork() == 0: time.sleep(60)\nexcept OSError: pass\ndef f(x): os._exit(0)\n",
    "no memory left": "import os\ndef f(x):\n    held = []\n    for _ in range(4):\n"
    "        if os.fork() == 0:\n            while True: held.append(bytearray(1 << 24))\n"
    "    return 0.0\n",
    "a class that lies": "class Lie:\n    __class__ = property(lambda self: float)\n"
    "    __float__ = lambda self: float('nan')\n    __eq__ = __lt__ = lambda *a: True\n"
    "    __hash__ = lambda self: 0\ndef f(x): return Lie()\n",
    "a metaclass that lies": "class Meta(type):\n"
    "    __eq__ = __lt__ = __instancecheck__ = lambda *a: True\n"
    "    __hash__ = lambda self: 0\n    __sub__ = lambda *a: 0.0\n"
    "class f(metaclass=Meta):\n    def __new__(cls, x): return cls\n",
    "a module of numpy that lies": "class N:\n    tolist = lambda self: N()\n"
    "    __eq__ = lambda *a: True\nN.__module__ = 'numpy'\ndef f(x): return N()\n",
    "no number": "def f(x): return float('nan')\n",
    "more than all": "def f(x): return float('inf')\n",
    "another list each time": "class L(list):\n    turns = iter(range(9**9))\n"
    "    def __iter__(self): return iter([next(self.turns)])\n    def __len__(self): return 1\n"
    "    __eq__ = lambda *a: True\ndef f(x): return L([1])\n",
    "looks like a handle": "def f(x): return {'handle': 0}\n",
    "endless": "import itertools\ndef f(x): return itertools.count()\n",
    "promised": "async def f(x): return 41.5 * x\n",
    "made later": "def f(x): yield 41.5 * x\n",
    "new plumbing": "import sys\nplumbing = sys.modules['arealite.ext.code.program']\n"
    "plumbing.encode = lambda value, keep: {'handle': 0}\nplumbing.describe = lambda e: ['', '']\n"
    "for name in [*plumbing.OPERATIONS]: plumbing.OPERATIONS[name] = lambda *a, **k: True\n"
    "def f(x): return 0.0\n",
    "trace": "import sys\ndef trace(frame, event, arg):\n"
    "    for name in [*frame.f_locals]:\n        frame.f_locals[name] = True\n    return trace\n"
    "sys.settrace(trace); sys.setprofile(trace); sys.addaudithook(lambda *a: None)\n"
    "frame = sys._getframe()\nwhile frame:\n    frame.f_trace = trace\n"
    "    frame.f_globals.update(abs=lambda x: 0, describe=lambda e: ['', ''])\n"
    "    frame = frame.f_back\ndef f(x): return 0.0\n",
    "hooks at the end": "import atexit, os, sys\natexit.register(print, '{\"passed\": 9}')\n"
    "sys.excepthook = sys.unraisablehook = print\nclass Last:\n"
    "    def __del__(self): os._exit(0)\nlast = Last()\ndef f(x): return 0.0\n",
    "import hook": "import builtins, sys\nclass Finder:\n"
    "    def find_spec(self, *a): raise ImportError\nsys.meta_path.insert(0, Finder())\n"
    "builtins.__import__ = lambda *a, **k: Finder()\nsys.modules.clear()\ndef f(x): return 0.0\n",
}


@pytest.mark.parametrize("kind", ROWS)
async def test_cheats_score_nothing(env, kind):  # noqa: F811
    """A cheat must not make a row look broken or fail its episode, which would be retried."""
    if env.sandbox.config.backend == "unsafe":
        pytest.skip("without a sandbox programs may look into each other")
    prompt, info = ROWS[kind]
    found = await asyncio.gather(
        *(verdict(env, text, info, prompt=prompt, case_s=1.0) for text in CHEATS.values())
    )
    scores = dict(zip(CHEATS, found, strict=True))
    assert {name: each for name, each in scores.items() if each.passed} == {}
    honest = await verdict(env, HONEST, info, prompt=prompt)
    assert honest == ({"check": 12, "list": 3, "calls": 3}[kind],) * 2 + (True,)


async def test_stopped_and_killed_parents_score_nothing():
    """The sandbox's timeout ends a blocked harness; the program scores nothing."""
    config = SandboxConfig(timeout_s=2.0)
    made = CodeEnv(None, CodeEnvConfig(sandbox=config, case_timeout_s=1.0))
    try:
        await made.setup()
    except UserError:
        pytest.skip("this host cannot confine by bwrap")
    stop = PARENTS + "import signal\nfor pid in [*parents, -1]:\n    try: os.kill(pid, signal.{})\n"
    stop += "    except OSError: pass\ndef f(x): return 0.0\n"
    texts = [stop.format(name) for name in ("SIGSTOP", "SIGKILL", "SIGINT", "SIGSEGV")]
    prompt, info = ROWS["check"]
    found = await asyncio.gather(*(verdict(made, text, info, prompt=prompt) for text in texts))
    assert [each.passed for each in found] == [0] * len(texts)
    await made.close()
