"""Roles that a warm parent forks are like those that the supervisor starts, also after failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from arealite.ext.warm_start import parent, starts
from arealite.ext.warm_start.starts import ForkedRole, WarmParent
from arealite.impl.launcher.processes import Child, spawn
from tests.impl.launcher import role_dump
from tests.waiting import eventually, has_exited, spawned, until, until_exited

Start = Callable[..., Any]

PRINTS_ORIGIN = """
import os, sys
module = sys.modules.get("arealite.ext.warm_start.parent")
origin = "forked" if module and module.is_warm else "alone"
print(f"{origin} {os.getpid()}\\n", end="", flush=True)  # one write, as others write there, too
"""
LIVES = f"""
from arealite.impl.launcher.processes import die_with_parent
die_with_parent()
{PRINTS_ORIGIN}
import threading
threading.Event().wait(600)
"""
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from arealite.ext.warm_start.starts import WarmParent

async def main(folder):
    warm = WarmParent([["json"]], {})
    warm.start()
    role = await warm.start_role("r", [sys.executable, folder + "/role.py"], None, {}, 0)
    print("pids", warm.process.pid, role.pid, flush=True)
    await role.process.wait()

asyncio.run(main(sys.argv[1]))
"""
NESTED = """
import asyncio, os, sys
from pathlib import Path
from types import SimpleNamespace
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
from arealite.ext.warm_start import starts as warm_starts

warm = warm_starts.fork_here()
print("supervisor", os.getpid(), warm.process.pid, flush=True)

async def main():
    words = [sys.executable, sys.argv[1]]
    inner = await warm.start_role("inner", words, Path(sys.argv[2]), {"INNER": "1"}, 0)
    print("inner", inner.pid, await inner.process.wait(), flush=True)

asyncio.run(main())
warm.close()
sys.exit(5)
"""


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Return a function that starts a script from a warm parent, and waits for its exit."""
    warm: WarmParent | None = None

    async def start_role(script: str, **environment: str) -> Child:
        nonlocal warm
        if warm is None:
            warm = started_parent()
        return await start_script(warm, tmp_path, script, **environment)

    yield start_role
    if warm is not None:
        warm.close()


def started_parent(*modules: str, **environment: str) -> WarmParent:
    """Return a warm parent that imports modules."""
    warm = WarmParent([[*modules]], environment)
    warm.start()
    return warm


async def start_script(warm: WarmParent, folder: Path, script: str, **environment: str) -> Child:
    """Start a script from a warm parent; its log is `log` in the folder."""
    file = folder / "role.py"
    file.write_text(script)
    return await warm.start_role(
        "role-0", [sys.executable, str(file)], folder / "log", environment, 0
    )


async def has_imported(warm: WarmParent) -> None:
    await eventually(lambda: warm.num_imported == len(warm.stages), "the imports")


async def ended(child: Child) -> int:
    return await asyncio.wait_for(child.process.wait(), 60)


def own_children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


# ---------------------------------------------------------------- like a new process


@pytest.mark.parametrize("form", ["module", "file"])
async def test_forked_role_has_the_state_of_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
):
    os.set_inheritable(leak := os.open(tmp_path, os.O_RDONLY), True)
    umask = os.umask(0o027)
    monkeypatch.setenv("A_TEXT", "é\udcff \n=")
    words = ["-m", role_dump.__name__] if form == "module" else [str(role_dump.__file__)]
    warm = started_parent("json", "asyncio", OMP_NUM_THREADS="1")
    folder = os.getcwd()
    try:
        os.chdir(folder if form == "module" else tmp_path)  # the warm parent runs already
        command = [sys.executable, *words, "a word", ""]
        own = {"OMP_NUM_THREADS": "1", "OWN": "x"}
        alone = await spawn("r", command, log=tmp_path / "alone", environment=own)
        assert await ended(alone) == 0
        (tmp_path / "alone").rename(tmp_path / "log of a new process")
        forked = await warm.start_role("r", command, tmp_path / "alone", own, 0)
        assert isinstance(forked.process, ForkedRole)
        assert await ended(forked) == 0
        wanted = json.loads((tmp_path / "log of a new process").read_text())
        assert json.loads((tmp_path / "alone").read_text()) == wanted
        assert wanted["parent"] == os.getpid() and wanted["leads its session"]
        assert {"OWN": "x", "A_TEXT": "é\udcff \n="}.items() <= wanted["environ"].items()
    finally:
        os.chdir(folder)
        os.umask(umask)
        os.close(leak)
        warm.close()


ENDS = {
    "returns": ("print('text')", 0),
    "exits": ("import sys; print('text', end=''); sys.exit(7)", 7),
    "exits with a text": ("import sys; sys.exit('a reason')", 1),
    "raises": ("def f(): raise ValueError('a fault')\nf()", 1),
    "is interrupted": ("raise KeyboardInterrupt", -signal.SIGINT),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "aborts": ("import os; os.abort()", -signal.SIGABRT),
    "skips the exit": ("import os; os._exit(9)", 9),
    "has an exit handler": ("import atexit; atexit.register(print, 'at exit')", 0),
    "has a thread": (
        "import threading, time\n"
        "end = threading.Event()\n"
        "threading.Thread(target=lambda: (end.wait(), print('thread'))).start()\n"
        "import atexit, threading\nthreading._register_atexit(end.set)",
        0,
    ),
    "fails in an exit handler": (
        "import atexit\n"
        "class Fails:\n"
        "    def __call__(self): 1 / 0\n"
        "    def __repr__(self): return 'a handler'\n"
        "atexit.register(Fails())",
        0,
    ),
    "leaves a file open": ("import os\nfile = open(os.dup(1), 'w')\nfile.write('text')", 0),
    "leaves a frozen file open": (
        "import os\n"
        "from arealite.ext.warm_start import parent as warm_parent\n"
        "file = open(os.dup(1), 'w')\n"
        "file.write('text')\n"
        "warm_parent.freeze()",
        0,
    ),
}


async def test_forked_role_ends_like_a_new_process(tmp_path: Path, start: Start):
    file = tmp_path / "role.py"
    log = tmp_path / "log"
    for end, (script, code) in ENDS.items():
        forked = await start(script)
        assert isinstance(forked.process, ForkedRole), end
        assert await ended(forked) == forked.code == forked.process.returncode == code, end
        text = log.read_text()
        log.unlink()
        alone = await spawn("role-0", [sys.executable, str(file)], log=log, environment={})
        assert await ended(alone) == code, end
        assert forked.exit_summary == alone.exit_summary, end
        head, traceback, frames = log.read_text().partition("Traceback (most recent call last):\n")
        assert text.startswith(head + traceback) and text.endswith(frames), end
        assert traceback or text == head, f"{end}: only a traceback has frames of the warm parent"
        log.unlink()


async def test_role_that_cannot_write_its_output_exits_like_a_new_process(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    role = await start("import os; os.close(1); print('lost')")
    assert isinstance(role.process, ForkedRole)
    words = [sys.executable, str(tmp_path / "role.py")]
    alone = await spawn("role-0", words, log=tmp_path / "alone", environment={})
    assert await ended(role) == await ended(alone) == parent.FLUSH_FAILED
    for log in ("log", "alone"):
        first, last = (tmp_path / log).read_text().splitlines()
        assert first.startswith("Exception ignored in: <_io.TextIOWrapper name='<stdout>'")
        assert last == "OSError: [Errno 9] Bad file descriptor"


async def test_log_is_appended_and_the_report_has_only_the_last_life(tmp_path: Path, start: Start):
    first = await start("print('first life')")
    assert await ended(first) == 0
    second = await start("import sys; print('second life'); sys.exit(3)")
    assert await ended(second) == 3
    assert (tmp_path / "log").read_text() == "first life\nsecond life\n"
    assert "second life" in second.exit_report and "first life" not in second.exit_report


async def test_random_numbers_of_two_roles_differ(tmp_path: Path):
    script = (
        "import random, uuid, numpy\nprint(random.random(), uuid.uuid4(), numpy.random.random())"
    )
    warm = started_parent("random", "uuid", "numpy", "numpy.random")
    try:
        for _ in range(2):
            assert await ended(await start_script(warm, tmp_path, script)) == 0
    finally:
        warm.close()
    first, second = (line.split() for line in (tmp_path / "log").read_text().splitlines())
    assert not {*first} & {*second}


@pytest.mark.parametrize("count", ["1", "2"])
async def test_libraries_have_the_threads_of_a_new_process(tmp_path: Path, count: str):
    script = """
import ctypes, os, re, numpy
path = re.findall(r"/\\S*libscipy_openblas64_\\S*", open("/proc/self/maps").read())[0]
print(ctypes.CDLL(path).scipy_openblas_get_num_threads64_(), len(os.listdir("/proc/self/task")))
"""
    warm = started_parent("numpy", OMP_NUM_THREADS="1")
    try:
        forked = await start_script(warm, tmp_path, script, OMP_NUM_THREADS=count)
        assert isinstance(forked.process, ForkedRole)
        assert await ended(forked) == 0
    finally:
        warm.close()
    words = [sys.executable, str(tmp_path / "role.py")]
    alone = await spawn("r", words, log=tmp_path / "log", environment={"OMP_NUM_THREADS": count})
    assert await ended(alone) == 0
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first == second == f"{count} {count}"


async def test_torch_has_the_threads_of_the_role(tmp_path: Path):
    warm = started_parent("torch", OMP_NUM_THREADS="1")
    try:
        for count in "121":
            script = "import torch; print(torch.get_num_threads())"
            role = await start_script(warm, tmp_path, script, OMP_NUM_THREADS=count)
            assert isinstance(role.process, ForkedRole)
            assert await ended(role) == 0
    finally:
        warm.close()
    assert (tmp_path / "log").read_text() == "1\n2\n1\n"


def test_uvloop_supervises_a_forked_role(tmp_path: Path):
    async def main() -> int:
        warm = started_parent()
        try:
            role = await start_script(warm, tmp_path, "import sys; sys.exit(7)")
            assert isinstance(role.process, ForkedRole)
            return await ended(role)
        finally:
            warm.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == 7


# ---------------------------------------------------------------- deaths


async def test_death_of_the_warm_parent_kills_no_role_and_the_next_start_makes_a_new_one(
    tmp_path: Path,
):
    before = own_children()  # of other tests of this process
    warm = started_parent("json")
    try:
        role = await start_script(warm, tmp_path, LIVES)
        await eventually((tmp_path / "log").read_text, "the role, which has read its script")
        first = warm.process
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        await eventually(lambda: warm.process is None, "the report of the death")
        with pytest.raises(ChildProcessError):  # it is reaped
            os.waitpid(first.pid, os.WNOHANG)  # noqa: ASYNC222  (it does not block)
        assert role.running and not has_exited(role.pid)
        for origin in ("alone", "forked"):
            (tmp_path / "log").unlink()
            await has_imported(warm) if origin == "forked" else None
            child = await start_script(warm, tmp_path, PRINTS_ORIGIN)
            assert await ended(child) == 0
            assert (tmp_path / "log").read_text().split() == [origin, str(child.pid)]
        assert warm.process is not None and warm.process.pid != first.pid
        assert role.running and not has_exited(role.pid)
        role.kill()
        assert await ended(role) == -signal.SIGKILL
    finally:
        warm.close()
    assert own_children() <= before


async def test_role_does_not_wait_for_the_imports_of_a_later_warm_parent(tmp_path: Path):
    go = tmp_path / "go"
    (tmp_path / "until_go.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    warm = started_parent("until_go", PYTHONPATH=str(tmp_path))
    try:
        assert warm.process is not None
        os.kill(warm.process.pid, signal.SIGKILL)
        for _ in range(2):
            role = await start_script(warm, tmp_path, PRINTS_ORIGIN)
            assert not isinstance(role.process, ForkedRole)
            assert await ended(role) == 0
        go.touch()
        await has_imported(warm)
        role = await start_script(warm, tmp_path, PRINTS_ORIGIN)
        assert isinstance(role.process, ForkedRole)
        assert await ended(role) == 0
    finally:
        warm.close()


async def killed_at(point: str, folder: Path) -> tuple[WarmParent, Child]:
    """Start a role from a warm parent that dies at a point of the request."""
    mark = str(folder / "mark")
    warm = started_parent("tests.impl.launcher.dying_parent", POINT=point, MARK=mark)
    return warm, await start_script(warm, folder, PRINTS_ORIGIN)


@pytest.mark.parametrize("point", ["at the request", "in between", "in the role", "after the fork"])
async def test_role_starts_alone_and_once_if_the_warm_parent_dies_during_the_request(
    tmp_path: Path, point: str
):
    before = own_children()
    warm, role = await killed_at(point, tmp_path)
    try:
        assert not isinstance(role.process, ForkedRole)
        assert warm.process is not None
        assert own_children() - before <= {role.pid, warm.process.pid}
        assert await ended(role) == 0
        assert (tmp_path / "log").read_text().split() == ["alone", str(role.pid)]
        await has_imported(warm)
        again = await start_script(warm, tmp_path, PRINTS_ORIGIN)
        assert isinstance(again.process, ForkedRole), "from the next warm parent"
        assert await ended(again) == 0
    finally:
        warm.close()
    assert own_children() <= before


async def test_role_continues_if_the_warm_parent_dies_when_the_role_has_started(tmp_path: Path):
    warm, role = await killed_at("after the start", tmp_path)
    try:
        assert isinstance(role.process, ForkedRole)
        assert await ended(role) == 0
        assert (tmp_path / "log").read_text().split() == ["forked", str(role.pid)]
        await eventually(lambda: warm.process is None, "the report of the death")
    finally:
        warm.close()


async def test_stopped_warm_parent_is_killed_and_the_role_starts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(starts, "ANSWER_S", 0.2)
    warm = started_parent()
    try:
        assert warm.process is not None
        stopped = warm.process.pid
        warm._read_answers()
        await has_imported(warm)
        os.kill(stopped, signal.SIGSTOP)
        role = await start_script(warm, tmp_path, PRINTS_ORIGIN)
        assert not isinstance(role.process, ForkedRole)
        assert await ended(role) == 0
        assert has_exited(stopped)
    finally:
        warm.close()


async def test_cancelled_request_leaves_no_process(tmp_path: Path):
    before = own_children()
    mark = tmp_path / "mark"
    warm = started_parent("tests.impl.launcher.dying_parent", POINT="hangs", MARK=str(mark))
    starting = asyncio.ensure_future(start_script(warm, tmp_path, PRINTS_ORIGIN))
    await eventually(mark.with_suffix(".hangs").exists, "the request")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert own_children() <= before
    assert not (tmp_path / "log").read_text()
    warm.close()


def test_supervisor_is_no_subreaper_outside_of_a_request():
    before = starts.ctypes.c_int()
    inside = starts.ctypes.c_int()
    get = starts.PR_GET_CHILD_SUBREAPER
    prctl = starts.ctypes.CDLL(None).prctl
    with starts.subreaper():
        prctl(get, starts.ctypes.byref(inside))
    prctl(get, starts.ctypes.byref(before))
    assert (inside.value, before.value) == (1, 0)


def test_death_of_the_supervisor_kills_the_warm_parent_and_the_role(tmp_path: Path):
    (tmp_path / "role.py").write_text(LIVES)
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path)]
    with spawned(command, os.environ | {"PYTHONPATH": os.getcwd()}) as supervisor:
        assert supervisor.stdout is not None
        lines = [supervisor.stdout.readline().split() for _ in range(2)]
        pids = next(line for line in lines if line[0] == "pids")
        assert ["forked", pids[2]] in lines
        assert "arealite warm parent" in psutil.Process(int(pids[1])).cmdline()
        supervisor.kill()
        supervisor.wait(60)
        until_exited(*map(int, pids[1:]))


def test_death_of_the_supervisor_kills_a_warm_parent_that_imports(tmp_path: Path):
    (tmp_path / "hangs.py").write_text(
        f"import time\nopen({str(tmp_path / 'hangs')!r}, 'w').close()\ntime.sleep(600)\n"
    )
    script = """
import time
from arealite.ext.warm_start.starts import WarmParent
warm = WarmParent([["hangs"]], {})
warm.start()
print(warm.process.pid, flush=True)
time.sleep(600)
"""
    own = {"PYTHONPATH": f"{os.getcwd()}:{tmp_path}"}
    with spawned([sys.executable, "-c", script], os.environ | own) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        until((tmp_path / "hangs").exists, what="the import")
        supervisor.kill()
        supervisor.wait(60)
        until_exited(pid)


@pytest.mark.parametrize("point", ["thread", "cuda"])
async def test_warm_parent_with_a_thread_or_cuda_does_not_fork(tmp_path: Path, point: str):
    warm, role = await killed_at(point, tmp_path)
    assert not isinstance(role.process, ForkedRole)
    assert await ended(role) == 0
    assert warm.process is None, "another one could not fork either"
    again = await start_script(warm, tmp_path, PRINTS_ORIGIN)
    assert await ended(again) == 0
    assert warm.process is None
    assert (tmp_path / "log").read_text().split()[::2] == ["alone", "alone"]


async def test_role_is_forked_between_two_imports_of_a_later_stage(tmp_path: Path):
    go = tmp_path / "go"
    (tmp_path / "until_asked.py").write_text(
        "import select, sys\nselect.select([int(sys.argv[1])], [], [])\n"
    )
    (tmp_path / "until_go.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    stages = [["json"], ["until_asked", "until_go"]]
    warm = WarmParent(stages, {"PYTHONPATH": str(tmp_path)})
    warm.start()
    file = tmp_path / "role.py"
    file.write_text("import sys; print('until_asked' in sys.modules, 'until_go' in sys.modules)")
    words = [sys.executable, str(file)]
    try:
        late = asyncio.ensure_future(warm.start_role("late", words, tmp_path / "late", {}, 1))
        light = await warm.start_role("light", words, tmp_path / "light", {}, 0)
        assert isinstance(light.process, ForkedRole)
        assert await ended(light) == 0 and not late.done()
        go.touch()
        assert await ended(await late) == 0
    finally:
        warm.close()
    assert (tmp_path / "light").read_text() == "True False\n"
    assert (tmp_path / "late").read_text() == "True True\n"


# ---------------------------------------------------------------- the warm parent of a role


async def test_role_forks_a_warm_parent_of_its_own(tmp_path: Path, start: Start):
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import os, sys\nprint(os.getppid(), os.environ['INNER'], sys.argv)\nsys.exit(6)"
    )
    (tmp_path / "inner.log").touch()
    script = f"import sys\nsys.argv[1:] = [{str(inner)!r}, {str(tmp_path / 'inner.log')!r}]\n"
    outer = await start(script + NESTED)
    assert await ended(outer) == 5
    supervisor, said = (line.split() for line in (tmp_path / "log").read_text().splitlines())
    assert supervisor[:2] == ["supervisor", str(outer.pid)]
    assert said[::2] == ["inner", "6"]
    assert (tmp_path / "inner.log").read_text() == f"{outer.pid} 1 [{str(inner)!r}]\n"
    until_exited(int(supervisor[2]))


def test_process_that_no_warm_parent_forked_forks_none():
    assert not parent.is_warm
    assert starts.fork_here() is None


# ---------------------------------------------------------------- off


def test_warm_parent_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    words = [sys.executable, "-m", "arealite.cli.main"]
    assert starts.can_start(words)
    assert not starts.can_start(["srun", *words])
    assert not starts.can_start([sys.executable, "-c", "pass"])
    monkeypatch.setenv(starts.SWITCH, "0")
    assert not starts.can_start(words)


def test_system_without_pidfds_has_no_warm_parent(monkeypatch: pytest.MonkeyPatch):
    def fails(pid: int) -> int:
        raise OSError("seccomp")

    monkeypatch.setattr(os, "pidfd_open", fails)
    assert not starts.is_possible()
