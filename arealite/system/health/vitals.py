"""Shows from outside whether a process lives, what it waits for and what blocks it.

A thread that needs nothing of the rest, because what it watches may hang. What it writes, it writes
for `diagnosis`; what it cannot write, nobody misses: it must never hurt its process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from arealite.base import log
from arealite.system.health import waits

logger = log.get(__name__)

PROC = Path("/proc")
BEAT_S = 1.0
TICK_S = 0.1
"""How often a watched loop says that it runs."""
BLOCKED_S = 1.0
"""A loop that runs nothing for this long is reported."""
COLLECTIVES = os.path.join("torch", "distributed", "")
"""Where the main thread is while it meets other ranks, or waits for them."""
Spent = tuple[float, float, float, float]
"""Now (the monotonic clock), the seconds that a thread ran since it began, those that it could have
and waited for a CPU (booked when the wait ends), and how often it got one."""
MAX_GROUPS = 30
STACK_FRAMES = 12
ASK = "ask"
"""The file whose touch makes every role write its stacks; its time tells one request from the
next."""


class Waits(msgspec.Struct):
    """Equal waits of one process: the oldest, and how many there are."""

    what: str
    owner: str
    on: str
    waited_s: float
    quiet_s: float
    """Since the last sign of whom it waits for."""
    seconds: float | None
    prompt: bool
    detail: str
    count: int = 1


class Vitals(msgspec.Struct):
    """What one process shows, about once a second."""

    name: str
    pid: int
    host: str
    started: int
    """In the kernel's ticks: tells a process from a later one with its pid. 0: not known."""
    stacks: str
    """File in the same folder to which SIGUSR1 adds all threads' stacks."""
    clock: float = 0.0
    """When it was written, by the monotonic clock, which the processes of one host share."""
    awake_s: float = 0.0
    """Since it began, or was last stopped or blocked: before, it could hear nobody."""
    lag_s: float = 0.0
    """How late a loop ran what was due, at worst since the last beat."""
    blocked_s: float = 0.0
    """How long a loop has run nothing; 0 where all run."""
    blocked_stack: str = ""
    cpu: dict[int, Spent | None] = {}
    """Of the main thread, whose number is the pid, when all loops last ran; of the one that wrote
    this, now."""
    waits: list[Waits] = []
    counters: dict[str, float] = {}


class LoopWatch:
    """How late one event loop runs what is due, and whether it runs at all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.get_ident()
        self.lag_s = self.lag_max_s = 0.0
        self._due = time.monotonic()
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        lag = now - self._due
        self.lag_s, self.lag_max_s = max(self.lag_s, lag), max(self.lag_max_s, lag)
        self._due = now + TICK_S
        self.loop.call_later(TICK_S, self._tick)

    def blocked_s(self) -> float:
        """Return how long the loop has been late, while it runs."""
        return time.monotonic() - self._due if self.loop.is_running() else 0.0


_loops: list[LoopWatch] = []


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """Measure the lag of a loop that runs in this thread, or will."""
    _loops[:] = [each for each in _loops if not each.loop.is_closed()]
    _loops.append(LoopWatch(loop))


def lag_max_s() -> float:
    """Return the worst lag of this process's watched loops."""
    return max((each.lag_max_s for each in _loops), default=0.0)


class Recorder(threading.Thread):
    """Writes `folder`/`name`.json until `close`."""

    def __init__(self, name: str, folder: Path) -> None:
        # A thread begins with an empty context, and the log's role is in the context.
        context = contextvars.copy_context()
        super().__init__(target=lambda: context.run(self._beat_forever), name="vitals", daemon=True)
        self.folder = folder
        pid, host = os.getpid(), socket.gethostname()
        _, started = process(pid) or ("", 0)
        self.vitals = Vitals(name, pid, host, started, f"{name}.stacks")
        self._over = threading.Event()
        self._was_blocked, self._woke = False, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (folder / self.vitals.stacks).open("wb")
        # After `close`, this handler replaces faulthandler's: `arealite why` may send SIGUSR1 to a
        # role that exits. SIG_IGN would be inherited by child processes.
        with suppress(ValueError):  # only the main thread may set a handler
            signal.signal(signal.SIGUSR1, _ignore_signal)
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._asked = written_ns(self.folder / ASK)
        self.beat()

    def beat(self) -> None:
        """Write once."""
        vitals, before = self.vitals, self.vitals.clock
        vitals.clock = time.monotonic()
        vitals.lag_s = max((each.lag_s for each in _loops), default=0.0)
        for each in _loops:
            each.lag_s = 0.0
        frame = _frames().get(threading.main_thread().ident or 0)
        met = frame is not None and COLLECTIVES in frame.f_code.co_filename
        vitals.waits, vitals.counters = _waits(), waits.counters | {"in_collective": float(met)}
        has_slept = vitals.clock - before > 2 * BEAT_S  # stopped, or held, and the loops with us
        vitals.blocked_s, vitals.blocked_stack = 0.0, ""
        if not has_slept:
            self._look_at_loops()
        for thread in (threading.get_native_id(), *([] if vitals.blocked_s else [vitals.pid])):
            vitals.cpu[thread] = spent(vitals.pid, thread)
        if has_slept or max(vitals.blocked_s, vitals.lag_s) > BLOCKED_S:
            self._woke = vitals.clock
        vitals.awake_s = vitals.clock - self._woke
        try:
            self._write("json", msgspec.json.encode(vitals))
        except OSError:  # on a full disk the old file can still say that we live
            os.utime(self.folder / f"{vitals.name}.json")
        if (asked := written_ns(self.folder / ASK)) != self._asked:
            self._asked = asked
            self._write("dump", stacks().encode())

    def close(self) -> None:
        """Take the files back."""
        self._over.set()
        self.join(10.0)  # what it writes later would be left behind
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()
        for suffix in ("json", "dump", "stacks"):
            with suppress(OSError):
                (self.folder / f"{self.vitals.name}.{suffix}").unlink()

    def _beat_forever(self) -> None:
        while not self._over.wait(BEAT_S):
            with suppress(Exception):  # a full disk, a shared folder gone: not our process's matter
                self.beat()

    def _look_at_loops(self) -> None:
        vitals = self.vitals
        worst = max(_loops, key=LoopWatch.blocked_s, default=None)
        blocked_s = worst.blocked_s() if worst is not None else 0.0
        if worst is None or blocked_s < BLOCKED_S:
            self._was_blocked = False
            return
        frame = _frames().get(worst.thread)
        vitals.blocked_s = blocked_s
        vitals.blocked_stack = stack = "".join(traceback.format_stack(frame)[-STACK_FRAMES:])
        if not self._was_blocked:
            self._was_blocked = True
            logger.warning("event loop blocked", seconds=round(blocked_s, 1), stack=stack)

    def _write(self, suffix: str, content: bytes) -> None:
        """Replace a file at once: readers see the old one or the new, never half of one."""
        file = self.folder / f"{self.vitals.name}.{suffix}"
        part = file.with_name(f".{file.name}")
        part.write_bytes(content)
        os.replace(part, file)


def _ignore_signal(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing."""


_recorder: Recorder | None = None


def start(name: str, folder: Path) -> None:
    """Begin to write this process's vitals to `folder`/`name`.json, about once a second.

    They are removed when the process ends by itself: what is left behind tells of a death. A second
    start ends the first: the process has gone on to another run.
    """
    global _recorder
    if _recorder is not None:
        _recorder.close()
    try:
        _recorder = Recorder(name, folder)
    except OSError as error:
        logger.warning("no vitals", folder=str(folder), error=str(error))
        return
    atexit.register(_recorder.close)
    _recorder.start()


def rename(name: str) -> None:
    """Show this process under another name: a server has none before it has a port."""
    if _recorder is not None:
        start(name, _recorder.folder)


def process(pid: int, thread: int = 0) -> tuple[str, int] | None:
    """Return the state letter and start time in ticks of a process, or of one of its threads; None:
    it is gone."""
    with suppress(OSError):
        stat = (PROC / f"{pid}/task/{thread or pid}/stat").read_text(errors="replace")
        fields = stat.rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return None


def spent(pid: int, thread: int) -> Spent | None:
    """Read a thread's books; None: it is gone, or its kernel keeps none (gVisor)."""
    with suppress(OSError, ValueError):
        books = (PROC / f"{pid}/task/{thread}/schedstat").read_text()
        ran, waited, turns = map(int, books.split())
        return (time.monotonic(), ran / 1e9, waited / 1e9, turns) if turns else None
    return None


def written_ns(file: Path) -> int:
    """Return when a file was last written; 0 where there is none."""
    with suppress(OSError):
        return file.stat().st_mtime_ns
    return 0


def _waits() -> list[Waits]:
    """Return the waits of this process, equal ones together, the oldest first."""
    now, groups = time.monotonic(), dict[tuple[str, ...], Waits]()
    for w in sorted(waits.table.copy(), key=lambda w: w.since):
        words = (text.partition(" ")[0] for text in (w.what, w.owner))
        key = w.on, *(word if word.isalpha() else "#" for word in words)
        if (group := groups.get(key)) is not None:
            group.count += 1
        elif len(groups) < MAX_GROUPS:
            times = now - w.since, now - w.heard
            groups[key] = Waits(w.what, w.owner, w.on, *times, w.seconds, w.prompt, w.detail)
    return list(groups.values())


def stacks() -> str:
    """Return what every other thread and every task of a watched loop does, innermost call first.

    One a line; equal ones are together.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    groups: dict[tuple[str, str], list[str]] = {}
    for ident, frame in _frames().items():
        if ident == threading.get_ident():
            continue
        places = [_place(each, line) for each, line in traceback.walk_stack(frame)]
        path = " < ".join(places)
        groups.setdefault(("thread", path), []).append(names.get(ident, "?"))
    for each in _loops:
        for task in asyncio.all_tasks(each.loop):
            groups.setdefault(("task", _task_path(task)), []).append(task.get_name())
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1])))
    return "".join(f"{len(n)} x {kind} {n[0]}: {path}\n" for (kind, path), n in ordered)


def _task_path(task: asyncio.Task[Any]) -> str:
    """Follow a task's chain of awaits to what it waits for."""
    places: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        kind = next((k for k in ("cr", "gi", "ag") if hasattr(awaited, f"{k}_frame")), None)
        if kind is None or (frame := getattr(awaited, f"{kind}_frame")) is None:
            break
        places.append(_place(frame, frame.f_lineno))
        work = frame.f_locals.get("work") if frame.f_code is waits.Wait.run.__code__ else None
        awaited = work or getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return " < ".join(reversed(places))


def _place(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{line} {code.co_name}"


def _frames() -> dict[int, FrameType]:
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage]
