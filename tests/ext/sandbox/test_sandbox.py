"""The sandbox contains programs that escape, exhaust resources, outlive their run or stop others,
and leaves none of their processes."""

from __future__ import annotations

import asyncio
import marshal
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import CodeType

import pytest
import uvloop

from arealite.base.errors import UserError, failure_class
from arealite.ext.sandbox import sandbox as process
from arealite.ext.sandbox import sandbox_init, seccomp
from arealite.ext.sandbox.config import SandboxConfig, SandboxFailed
from arealite.ext.sandbox.sandbox import BOOT, Sandbox
from tests.ext.sandbox.sandboxes import cell, left
from tests.waiting import eventually, until

LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
TRY = "try:\n    {}\n    print('escaped')\nexcept (OSError, ValueError) as error: print(error)\n"

REFUSED = {
    "read a secret file": TRY.format("open('/etc/shadow').read()"),
    "read the user's files": TRY.format("open('{home}/.ssh/id', 'rb').read()"),
    "read this repository": TRY.format("open('{here}').read()"),
    "write to the system": TRY.format("open('/usr/{mark}', 'w')"),
    "write to the root": TRY.format("open('/{mark}', 'w')"),
    "write to /dev": TRY.format("open('/dev/{mark}', 'w')"),
    "change a mode": TRY.format("__import__('os').chmod('/usr', 0o777)"),
    "change a time": TRY.format("__import__('os').utime('/usr/bin')"),
    "TCP": TRY.format("__import__('socket').create_connection(('1.1.1.1', 53), 1)"),
    "UDP": TRY.format("__import__('socket').socket(2, 2).sendto(b'x', ('1.1.1.1', 53))"),
    "DNS": TRY.format("__import__('socket').getaddrinfo('example.com', 80)"),
    "loopback": TRY.format("__import__('socket').create_connection(('127.0.0.1', {port}), 1)"),
    "an abstract socket": TRY.format("__import__('socket').socket(1).connect('\\0{mark}')"),
    "datagrams of a pair": TRY.format(
        "a, b = __import__('socket').socketpair(1, 2); a.sendto(b'x', '\\0{mark}')"
    ),
    "ptrace": LIBC + "if libc.ptrace(16, os.getppid(), 0, 0) == 0: print('escaped')",
    "another's memory": TRY.format("open(f'/proc/{{__import__(\"os\").getppid()}}/mem', 'r+b')"),
    "another's memory by a call": LIBC
    + "buffer = ctypes.create_string_buffer(16)\n"
    + "io = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 16)\n"
    + "if libc.process_vm_readv(os.getppid(), io, 1, io, 1, 0) >= 0: print('escaped')",
    "new namespaces": LIBC + "if libc.unshare(0x10000000) == 0: print('escaped')",
    "a child in a namespace": LIBC
    + "pid = libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0)\n"
    + "if pid == 0: os._exit(0)\n"
    + "if pid > 0: print('escaped')",
    "mount": LIBC + "if libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0: print('escaped')",
    "be root": LIBC + "if libc.setuid(0) == 0 and os.getuid() == 0: print('escaped')",
    "leave the group": TRY.format("__import__('os').setsid()"),
    "others' limits": LIBC
    + "limit = (ctypes.c_ulong * 2)(1 << 30, 1 << 30)\n"
    + "if libc.prlimit(os.getppid(), 9, limit, 0) == 0: print('escaped')",
    "memory of no process": TRY.format("__import__('os').memfd_create('x')"),
    "shared memory": LIBC + "if libc.shmget(0, 1 << 20, 0o1600) >= 0: print('escaped')",
    "others' shared memory": LIBC
    + "if libc.shmat(0, None, 0) == -1 and ctypes.get_errno() != 1: print('escaped')",
    "shared memory of no file": TRY.format("__import__('mmap').mmap(-1, 1 << 20)"),
    "shared zeros": TRY.format(
        "m = __import__('mmap'); m.mmap(open('/dev/zero').fileno(), 1 << 20, m.MAP_SHARED, 1)"
    ),
    "large buffers": TRY.format(
        "s = __import__('socket').socketpair(); s[0].setsockopt(1, 7, 10 << 20)"
    ),
    "sandbox_init's cores": TRY.format("import os; os.sched_setaffinity(os.getppid(), [0])"),
    "a signal to sandbox_init": "import os, time\nfor number in range(1, 65):\n"
    "    try: os.kill(os.getppid(), number)\n    except OSError: pass\ntime.sleep(0.1)",
    "a core dump": "import resource\nif resource.getrlimit(4)[1]: print('escaped')",
    "more of a limit": TRY.format("__import__('resource').setrlimit(9, (1 << 40, 1 << 40))"),
    "the environment": "import os\nif set(os.environ) - {{'PATH', 'HOME', 'PWD', 'LC_CTYPE'}}: "
    "print('escaped', os.environ)",
    "others' environment": TRY.format(
        "import os; assert b'secret' not in open(f'/proc/{{os.getppid()}}/environ', 'rb').read()"
    ),
    "others' processes": "import os\ntry: names = os.listdir('/proc')\n"
    "except OSError: names = []\n"
    "if len([n for n in names if n.isdigit()]) > 2: print('escaped')",
    "folders in /": "import os\ntry: names = os.listdir('/')\nexcept OSError: names = []\n"
    "if {{'home', 'work', 'srv', 'sys'}} & set(names): print('escaped')",
    "open files": "import os\nfor f in range(3, 64):\n"
    "    try: os.fstat(f); print('escaped', f)\n    except OSError: pass",
}
"""Programs by the access that the sandbox refuses. A program that gets access prints "escaped"."""

FORK = "import os, time\n{}\ndef fork():\n    try: return os.fork()\n    except OSError: return 1\n"
STOPPED = {
    "an endless loop": ("while True: pass", "timeout"),
    "a loop that heeds no signal": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "timeout",
    ),
    "sleep": ("import time\ntime.sleep(600)", "timeout"),
    "sleep with all files closed": (
        "import os, time\nos.closerange(0, 100)\ntime.sleep(600)",
        "timeout",
    ),
    "a fork bomb": (FORK.format("") + "while True: fork()", "timeout"),
    "threads without end": (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, "
        "args=(600,)).start()\n    except RuntimeError: time.sleep(600)",
        "timeout",
    ),
    "forks with memory": (
        FORK.format("for _ in range(2): os.fork()")
        + "x = bytearray(150 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(600)",
        "killed",
    ),
    "a flood of stdout": ("while True: print('x' * 1000)", "output"),
    "a flood of stderr": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "a flood from a child": (
        FORK.format("") + "if fork() == 0:\n    while True: print('x' * 1000)\ntime.sleep(600)",
        "output",
    ),
}
"""Programs that the sandbox kills, and the status of their outcome."""

ENDED = {
    "one large block": ("x = bytearray(1 << 30)", "MemoryError"),
    "block by block": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
    "one large file": ("f = open('/tmp/f', 'wb')\nwhile True: f.write(bytes(1 << 20))", "Error"),
    "many files": (
        "for n in range(100): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))",
        "Error",
    ),
    "shared memory files": (
        "for n in range(100): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20))",
        "Error",
    ),
    "depth": ("def f(): f()\nf()", "RecursionError"),
    "deep source": ("(" * 10000, "SyntaxError"),
}
"""Programs that Python ends with an error, and the error."""


@pytest.fixture
def mark(tmp_path):
    """A missing folder, on the command line of every process of this test."""
    return f"/nowhere{tmp_path}"


@pytest.fixture
async def sandbox(mark):
    """A sandbox; the test fails if a process of its programs is left."""
    made = cell(packages=mark, memory_mb=192)
    await made.setup()
    yield made
    assert not left(mark)


async def test_program_reads_stdin_and_its_output_is_returned(sandbox):
    program = "import sys\nprint('hello', sys.stdin.read())\nprint('err', file=sys.stderr)"
    done = await sandbox.run(program, stdin="wörld\n")
    assert (done.status, done.code) == ("exited", 0)
    assert (done.stdout, done.stderr) == ("hello wörld\n\n", "err\n")
    assert 0 < done.seconds < 60


async def test_exit_codes_and_signals_are_returned(sandbox):
    ends = {
        "": ("exited", 0),
        "import sys\nsys.exit(3)": ("exited", 3),
        "exit()": ("exited", 0),
        "1 / 0": ("exited", 1),
        "import os\nos._exit(7)": ("exited", 7),
        "def f(:": ("exited", 1),
        "import os\nos.abort()": ("killed", -signal.SIGABRT),
        "import ctypes\nctypes.string_at(0)": ("killed", -signal.SIGSEGV),
        "import os\nos.kill(0, 9)": ("killed", -signal.SIGKILL),
    }
    for program, end in ends.items():
        done = await sandbox.run(program)
        assert (done.status, done.code) == end, done


async def test_traceback_has_only_frames_of_the_program(sandbox):
    done = await sandbox.run("def f():\n    1 / 0\nf()")
    assert [line for line in done.stderr.splitlines() if "File" in line] == [
        '  File "<program>", line 3, in <module>',
        '  File "<program>", line 2, in f',
    ]


async def test_ordinary_programs_work(sandbox):
    programs = [
        "import threading\nt = threading.Thread(target=print, args=('done',))\nt.start()",
        "import asyncio\nasync def f(): print('done')\nasyncio.run(f())",
        "import subprocess\nprint(subprocess.run(['echo', 'done'], stdout=-1).stdout.decode())",
        "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint('done')",
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass A: x: int\n"
        "assert pickle.loads(pickle.dumps(A(1))) == A(1)\nif __name__ == '__main__': print('done')",
        "import json, re, math, itertools, decimal, random, time\nprint('done')",
        "import sys\nsys.stdin.readline()\nassert input() == 'b'\nprint('done')",
        "assert open(0).read() == 'a\\nb\\n'\nprint('done')",
        "print('done\\0\\udc80'.encode(errors='replace').decode())",
    ]
    for done in await asyncio.gather(*(sandbox.run(each, stdin="a\nb\n") for each in programs)):
        assert done.stdout.strip().startswith("done"), done


async def test_programs_import_from_the_packages_folder_and_cannot_write_there(tmp_path):
    (tmp_path / "mine.py").write_text("word = 'done'")
    made = cell(packages=str(tmp_path))
    tmp_path.chmod(0o755)  # programs of a sandbox of root run as another user
    assert (await made.run("import mine\nprint(mine.word)")).stdout == "done\n"
    assert "escaped" not in (await made.run(TRY.format(f"open('{tmp_path}/x', 'w')"))).stdout


async def test_programs_cannot_reach_files_network_or_other_processes(
    sandbox, tmp_path, monkeypatch
):
    monkeypatch.setenv("TOKEN", f"secret-{tmp_path.name}")
    listener = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{tmp_path.name}")
    abstract.listen()
    with listener, abstract:
        await check_refusals(sandbox, tmp_path.name, listener.getsockname()[1])
    assert not [p for p in ("/", "/usr", "/dev") if (Path(p) / tmp_path.name).exists()]


async def check_refusals(sandbox: Sandbox, mark: str, port: int) -> None:
    about = {"port": port, "mark": mark, "here": __file__, "home": Path.home()}
    programs = [program.format(**about) for program in REFUSED.values()]
    for name, done in zip(REFUSED, await asyncio.gather(*map(sandbox.run, programs)), strict=True):
        assert done.status == "exited", (name, done)
        assert "escaped" not in done.stdout, (name, done)
        assert not done.stderr, (name, done)  # access was refused; the program has no mistake


async def check_stops(sandbox: Sandbox) -> None:
    for name, (program, status) in STOPPED.items():
        seconds = sandbox.command.index(BOOT) + 2
        sandbox.command[seconds] = "0.4" if status == "timeout" else "60"
        done = await sandbox.run(program)
        assert (done.status, done.code) == (status, -signal.SIGKILL), (name, done)
        assert max(len(done.stdout), len(done.stderr)) <= sandbox.config.output_kb << 10


async def test_programs_over_a_limit_are_killed(sandbox):
    await check_stops(sandbox)


async def test_programs_out_of_memory_or_disk_get_an_error_of_python(sandbox):
    results = await asyncio.gather(*(sandbox.run(program) for program, _ in ENDED.values()))
    for (program, error), done in zip(ENDED.values(), results, strict=True):
        assert (done.status, done.code) == ("exited", 1), (program, done)
        assert error in done.stderr


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
async def test_program_that_makes_too_many_empty_files_is_killed(sandbox, folder):
    make = f"open(f'{folder}/{{n}}', 'w').close()"
    done = await sandbox.run(f"n = 0\nwhile True:\n    {make}\n    n += 1")
    assert done.status == "killed"


async def test_daemons_of_a_program_are_killed_when_it_exits(sandbox, mark):
    program = FORK.format("") + (
        "if fork() == 0:\n    try: os.setsid()\n    except OSError: pass\n"
        "    if fork() == 0:\n        os.closerange(0, 100)\n        time.sleep(600)\n"
        "print('parent')"
    )
    done = await sandbox.run(program)
    assert (done.status, done.stdout.splitlines()[-1]) == ("exited", "parent")
    assert not left(mark)  # when `run` returns, not later


async def test_sandbox_of_an_ordinary_user_confines_the_same(mark, tmp_path):
    made = cell("bwrap as a user", packages=mark, memory_mb=192)
    await check_refusals(made, tmp_path.name, 1)
    await check_stops(made)
    assert not left(mark)


async def test_programs_run_beside_a_fork_bomb(sandbox, mark):
    made = cell(packages=mark, concurrency=17, processes=8)
    bomb = asyncio.ensure_future(made.run(STOPPED["a fork bomb"][0]))
    await eventually(lambda: len(left(mark)) > 6, "the bomb")
    harmless = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint('done')"
    for done in await asyncio.gather(*(made.run(harmless) for _ in range(16))):
        assert done.stdout == "done\n", done
    bomb.cancel()
    with suppress(asyncio.CancelledError):
        await bomb


async def test_at_most_concurrency_programs_run_at_a_time(sandbox, mark):
    made = cell(packages=mark, concurrency=2)
    running = [asyncio.ensure_future(made.run("import time\ntime.sleep(600)")) for _ in range(6)]
    await eventually(lambda: len(left(mark)) >= 6, "two programs, each of three processes")
    assert len(left(mark)) == 6
    for run in running:
        run.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_cancelled_run_kills_its_program(sandbox, mark):
    run = asyncio.ensure_future(sandbox.run(FORK.format("fork = os.fork()") + "time.sleep(600)"))
    await eventually(lambda: len(left(mark)) >= 3, "the program")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not left(mark)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_run_cancelled_at_any_moment_leaves_no_process(loop, mark):
    made = cell(packages=mark)
    rng = random.Random(1)

    async def run_for(seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await made.run("import time\ntime.sleep(600)")

    async def main() -> None:
        await asyncio.gather(*(run_for(rng.uniform(0, 0.3)) for _ in range(30)))
        assert (await made.run("print(1)")).stdout == "1\n"  # all slots are free again
        await eventually(lambda: not left(mark), "nothing to be left")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_programs_of_a_killed_worker_are_killed(mark):
    cell()
    code = (
        "import asyncio\nfrom arealite.ext.sandbox.config import SandboxConfig\n"
        "from arealite.ext.sandbox.sandbox import Sandbox\n"
        f"made = Sandbox(SandboxConfig(packages={mark!r}, timeout_s=600))\n"
        "asyncio.run(made.run('import os, time\\nos.fork()\\ntime.sleep(600)'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3]) as worker:
        until(lambda: len(left(mark)) >= 4, what="the program")
        worker.kill()
        worker.wait()
    until(lambda: not left(mark), what="nothing to be left")


# ---------------------------------------------------------------- failures


async def test_sandbox_that_cannot_start_fails_with_the_reason(monkeypatch):
    made = Sandbox(SandboxConfig(backend="unsafe"))
    made.command = ["/nonexistent/bwrap"]
    with pytest.raises(SandboxFailed, match="nonexistent") as caught:
        await made.run("print(1)")
    assert failure_class(caught.value) == "sandbox_failed"
    made.command = [sys.executable, "-c", "import sys; sys.exit('no namespaces here')"]
    with pytest.raises(SandboxFailed, match="no namespaces here"):
        await made.run("print(1)" * 100_000)


def without_seccomp() -> CodeType:
    """Return the code of `sandbox_init` with an unknown prctl, as on a kernel without seccomp."""
    source = Path(sandbox_init.__file__).read_text()
    changed = source.replace("PR_SET_SECCOMP = 22", "PR_SET_SECCOMP = 9999")
    assert changed != source
    return compile(changed, "sandbox_init", "exec")


async def test_program_does_not_run_if_a_limit_cannot_be_applied(sandbox, monkeypatch):
    code = marshal.dumps(without_seccomp())
    monkeypatch.setattr(process, "init_code", lambda: code)
    with pytest.raises(SandboxFailed, match="Invalid argument"):
        await sandbox.run("print('escaped')")
    with pytest.raises(UserError, match="Invalid argument"):
        await sandbox.setup()


async def test_backend_unsafe_runs_kills_and_reaps_programs(mark):
    config = SandboxConfig(backend="unsafe", timeout_s=60.0, packages=mark)
    made = Sandbox(config)
    assert (await made.run("print(1)")).stdout == "1\n"
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)"
    assert (await made.run(daemon)).status == "exited"
    short = Sandbox(replace(config, timeout_s=0.5))
    assert (await short.run("while True: pass")).status == "timeout"
    assert not left(mark)


async def test_error_for_missing_bubblewrap_names_the_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    fix = r"bwrap: not on the PATH.*apt install bubblewrap.*sandbox.backend=unsafe"
    with pytest.raises(UserError, match=fix):
        await Sandbox(SandboxConfig()).setup()


async def test_bubblewrap_is_found_on_the_path_of_this_process(monkeypatch, tmp_path):
    """Programs in the sandbox have another PATH, with the system's folders only."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    (folder / "bwrap").write_text("#!/bin/sh\necho own >&2\n")
    (folder / "bwrap").chmod(0o755)
    with pytest.raises(UserError, match="cannot confine programs: own"):
        await Sandbox(SandboxConfig()).setup()


def test_system_call_table_has_each_number_once():
    for column in (0, 1):
        numbers = [pair[column] for pair in seccomp.CALLS["forbidden"].values()]
        assert len(set(numbers)) == len(numbers)
    assert os.uname().machine in seccomp.MACHINES
