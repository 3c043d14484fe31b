"""Runs each program under a warden of its own: what all backends share.

A warden that hears the end of its stdin ends the program; so a cancelled run, a killed worker and a
late program end in the same way.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from functools import cache
from itertools import cycle
from pathlib import Path
from random import random
from struct import pack
from threading import Timer
from typing import Any

from arealite.api.sandbox import Outcome, Sandbox, SandboxConfig, SandboxFailed
from arealite.base.errors import DeadlineError
from arealite.impl.sandbox import bwrap
from arealite.system.health.deadlines import deadline

START_S, END_S, PROBE_S = 60.0, 30.0, 30.0
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
PLACE: Any = {
    **{"stdin": PIPE, "stdout": PIPE, "stderr": PIPE},
    **{"cwd": "/", "env": ENVIRONMENT, "start_new_session": True},
}
"""A session of its own is not told of this terminal's signals, and has its share of the cores."""
BOOT = """import marshal, os
def receive(count):
    text = b""
    while len(text) < count:
        text += os.read(0, count - len(text)) or os._exit(0)
    return text
exec(marshal.loads(receive(int.from_bytes(receive(4), "little"))))"""
PROBE = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint('works')"
USERS = cycle(sorted(range(60000, 65000), key=lambda _: random()))
"""Ids for programs where this process is root's: each has one of its own, and so its own limit on
processes; no file is theirs."""


class ProcessSandbox(Sandbox):
    """A process a program, confined as `backend` says."""

    def __init__(self, config: SandboxConfig, backend: str) -> None:
        super().__init__(config)
        self.backend = backend
        self.command = command(config, backend)
        self._slots = asyncio.Semaphore(config.concurrency)

    async def run(self, program: str, *, stdin: str = "") -> Outcome:
        """Run a program in the next free slot."""
        seconds = START_S + self.config.timeout_s
        what, text = "a program in the sandbox", request(program, stdin)
        async with self._slots:
            try:
                async with deadline(what, owner="sandbox", on="warden", seconds=seconds):
                    process = await spawn(self.command)
                    try:
                        return outcome(*await ask(process, text))
                    finally:
                        await end(process)
            except (DeadlineError, OSError) as error:
                raise SandboxFailed(f"{self.backend}: {error}") from error

    def probe(self) -> str:
        """Run a program that forks; return "" or why it cannot be. Blocks."""
        try:
            with subprocess.Popen(self.command, **PLACE) as process:
                assert process.stdin and process.stdout and process.stderr
                patience = Timer(PROBE_S, process.kill)
                patience.start()
                with suppress(BrokenPipeError):
                    process.stdin.write(request(PROBE, ""))
                    process.stdin.flush()
                answer, problem = process.stdout.read(), process.stderr.read()
                patience.cancel()
            done = outcome(answer, problem)
        except (SandboxFailed, OSError) as error:
            return str(error)
        return "" if done.stdout == "works\n" else f"a program cannot fork: {done.stderr[-300:]}"


@cache
def warden() -> bytes:
    """Return the warden, compiled: that takes longer than most programs."""
    file = Path(__file__).with_name("warden.py")
    return marshal.dumps(compile(file.read_text(), "<warden>", "exec"))


def command(config: SandboxConfig, backend: str) -> list[str]:
    """Return the command that starts a warden, whose code comes first on its stdin."""
    folders = [sys.base_prefix, *([config.packages] if config.packages else [])]
    sizes = config.memory_mb << 20, config.processes, config.output_kb << 10, config.disk_mb << 20
    words = [backend, config.timeout_s, *sizes, *folders]
    outside = bwrap.command(folders, config.disk_mb << 20) if backend == "bwrap" else []
    python = [os.path.realpath(sys.executable), "-I", "-S", "-c", BOOT]
    return [*outside, *python, *map(str, words)]


def request(program: str, stdin: str) -> bytes:
    """Return what a warden is told, after its own code; what no file could hold becomes "?"."""
    code, texts = warden(), (program.encode(errors="replace"), stdin.encode(errors="replace"))
    head = pack("<I", len(code)) + code + pack("<3I", next(USERS), *map(len, texts))
    return head + b"".join(texts)


async def spawn(words: list[str]) -> Process:
    """Start a warden. Cancelled, wait for it and end it: killed while it starts, it could stay."""
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*words, **PLACE))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with suppress(OSError):
            await end(await starting)
        raise


async def ask(process: Process, text: bytes) -> tuple[bytes, bytes]:
    """Tell a warden its program; return all that it writes."""
    assert process.stdin and process.stdout and process.stderr
    with suppress(ConnectionError):  # it failed, and says why
        process.stdin.write(text)
        await process.stdin.drain()
    return await process.stdout.read(), await process.stderr.read()


async def end(process: Process) -> None:
    """Have the warden end its program, and wait until nothing is left."""
    assert process.stdin and process.stdout
    process.stdin.close()
    try:
        async with asyncio.timeout(END_S):
            with suppress(RuntimeError):  # a read that was cut still waits
                await process.stdout.read()
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def outcome(answer: bytes, problem: bytes) -> Outcome:
    """Read a warden's answer.

    Raises:
        SandboxFailed: there is none.
    """
    head, _, texts = answer.partition(b"\n")
    words = head.decode().split()
    if len(words) != 4:
        raise SandboxFailed(problem.decode(errors="replace").strip()[-500:] or "it was killed")
    size = int(words[3])
    out, err = (text.decode(errors="replace") for text in (texts[:size], texts[size:]))
    status: Any = words[0]
    return Outcome(status, int(words[1]), out, err, float(words[2]))
