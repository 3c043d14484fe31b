"""Writes the vitals of a process to a file: heartbeat, waits, event loop lag, CPU times.

A separate thread writes them, because the rest of the process may hang. Errors of this thread are
suppressed. `diagnosis` reads the files.
"""

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

import msgspec

from arealite.base import log, signals
from arealite.base.files import replacing
from arealite.system.health import waits

logger = log.get(__name__)

PROC = Path("/proc")
BEAT_S = 1.0
TICK_S = 0.1
"""Seconds between two timer callbacks in a watched event loop."""
BLOCKED_S = 1.0
"""An event loop that runs no callback for this long is reported as blocked."""
COLLECTIVES = os.path.join("torch", "distributed", "")
"""Part of the file name of the main thread's innermost frame during a collective."""
CpuTimes = tuple[float, float, float, float]
"""Scheduler statistics of a thread: the time of reading (monotonic clock), seconds on a CPU,
seconds in the run queue (added when a wait for a CPU ends), number of time slices."""
MAX_GROUPS = 30
STACK_FRAMES = 12
STACKS_REQUEST = "ask"
"""Name of a file in the vitals folder. A new modification time makes every role write its stacks.
"""


class Waits(msgspec.Struct):
    """Equal waits of one process: the oldest, and how many there are."""

    what: str
    owner: str
    on: str
    waited_s: float
    quiet_s: float
    """Seconds since the last sign of life of the role in `on`."""
    seconds: float | None
    replies_soon: bool
    detail: str
    count: int = 1


class Vitals(msgspec.Struct):
    """Vitals of one process, written about once a second."""

    name: str
    pid: int
    host: str
    started: int
    """Start time in kernel ticks, because a pid can be reused. 0: unknown."""
    stacks: str
    """File in the same folder. On SIGUSR1, the stacks of all threads are appended to it."""
    clock: float = 0.0
    """Time of writing by the monotonic clock, which the processes of one host share."""
    awake_s: float = 0.0
    """Seconds since the process started, or was last stopped or blocked."""
    lag_s: float = 0.0
    """Largest delay of a timer callback since the last heartbeat."""
    blocked_s: float = 0.0
    """Seconds for which an event loop has run no callback; 0 if all loops run."""
    blocked_stack: str = ""
    cpu: dict[int, CpuTimes | None] = {}
    """By thread id. The main thread's id is the pid; its times were read when all loops last ran.
    Those of the thread that writes the vitals were read now."""
    waits: list[Waits] = []
    counters: dict[str, float] = {}


class LoopWatch:
    """Measures how late one event loop runs its timer callbacks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.get_ident()
        self.lag_s = self.lag_max_s = 0.0
        self._due = time.monotonic()
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        lag = now - self._due
        self.lag_s = max(self.lag_s, lag)
        self.lag_max_s = max(self.lag_max_s, lag)
        self._due = now + TICK_S
        self.loop.call_later(TICK_S, self._tick)

    def blocked_s(self) -> float:
        """Return the seconds since a callback was due; 0 if the loop is not running."""
        return time.monotonic() - self._due if self.loop.is_running() else 0.0


_loops: list[LoopWatch] = []


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """Measure the lag of an event loop that runs, or will run, in this thread."""
    _loops[:] = [each for each in _loops if not each.loop.is_closed()]
    _loops.append(LoopWatch(loop))


def lag_max_s() -> float:
    """Return the largest lag of this process's watched event loops since their start."""
    return max((each.lag_max_s for each in _loops), default=0.0)


class Recorder(threading.Thread):
    """Thread that writes `folder`/`name`.json once a second until `close`."""

    def __init__(self, name: str, folder: Path) -> None:
        # A thread starts with an empty context; the context holds the role name of log lines.
        context = contextvars.copy_context()
        super().__init__(target=lambda: context.run(self._beat_forever), name="vitals", daemon=True)
        self.folder = folder
        pid = os.getpid()
        host = socket.gethostname()
        _, started = process_state(pid) or ("", 0)
        self.vitals = Vitals(name, pid, host, started, f"{name}.stacks")
        self._closed = threading.Event()
        self._was_blocked = False
        self._awake_since = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (folder / self.vitals.stacks).open("wb")
        # `close` restores this state: `arealite why` may send SIGUSR1 to a role that exits.
        signals.ignore(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._request_ns = modified_ns(self.folder / STACKS_REQUEST)
        self.beat()

    def beat(self) -> None:
        """Write the vitals once, and the stacks if they were requested."""
        vitals = self.vitals
        before = self.vitals.clock
        vitals.clock = time.monotonic()
        vitals.lag_s = max((each.lag_s for each in _loops), default=0.0)
        for each in _loops:
            each.lag_s = 0.0
        frame = _frames().get(threading.main_thread().ident or 0)
        in_collective = frame is not None and COLLECTIVES in frame.f_code.co_filename
        vitals.waits = _grouped_waits()
        vitals.counters = waits.counters | {"in_collective": float(in_collective)}
        has_slept = vitals.clock - before > 2 * BEAT_S  # the whole process was stopped or blocked
        vitals.blocked_s, vitals.blocked_stack = 0.0, ""
        if not has_slept:
            self._check_loops()
        for thread in (threading.get_native_id(), *([] if vitals.blocked_s else [vitals.pid])):
            vitals.cpu[thread] = cpu_times(vitals.pid, thread)
        if has_slept or max(vitals.blocked_s, vitals.lag_s) > BLOCKED_S:
            self._awake_since = vitals.clock
        vitals.awake_s = vitals.clock - self._awake_since
        try:
            self._write("json", msgspec.json.encode(vitals))
        except OSError:  # on a full disk, renew the modification time of the old file
            os.utime(self.folder / f"{vitals.name}.json")
        if (requested := modified_ns(self.folder / STACKS_REQUEST)) != self._request_ns:
            self._request_ns = requested
            self._write("dump", stacks().encode())

    def close(self) -> None:
        """Stop the thread and remove its files."""
        self._closed.set()
        self.join(10.0)  # a file that is written later would remain
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()
        for suffix in ("json", "dump", "stacks"):
            with suppress(OSError):
                (self.folder / f"{self.vitals.name}.{suffix}").unlink()

    def _beat_forever(self) -> None:
        while not self._closed.wait(BEAT_S):
            with suppress(Exception):  # a full disk or a missing folder must not end the process
                self.beat()

    def _check_loops(self) -> None:
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
        """Replace a file atomically."""
        file = self.folder / f"{self.vitals.name}.{suffix}"
        with replacing(file) as temporary:
            temporary.write_bytes(content)


_recorder: Recorder | None = None


def start(name: str, folder: Path) -> None:
    """Start to write this process's vitals to `folder`/`name`.json, about once a second.

    The file is removed when the process exits normally; a remaining file therefore means a crash.
    A second call replaces the first: the process continues with another run.
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
    """Write this process's vitals under another name, as a server does once it has a port."""
    if _recorder is not None:
        start(name, _recorder.folder)


def process_state(pid: int, thread: int = 0) -> tuple[str, int] | None:
    """Return the kernel's state letter and the start time in ticks of a process or thread.

    Args:
        pid: The process.
        thread: A thread of the process; 0 for its main thread.

    Returns:
        None if there is no such process or thread.
    """
    with suppress(OSError):
        stat = (PROC / f"{pid}/task/{thread or pid}/stat").read_text(errors="replace")
        fields = stat.rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return None


def cpu_times(pid: int, thread: int) -> CpuTimes | None:
    """Return a thread's scheduler statistics; None if the thread exited, or if the kernel has no
    such statistics (gVisor)."""
    with suppress(OSError, ValueError):
        text = (PROC / f"{pid}/task/{thread}/schedstat").read_text()
        ran, waited, slices = map(int, text.split())
        return (time.monotonic(), ran / 1e9, waited / 1e9, slices) if slices else None
    return None


def modified_ns(file: Path) -> int:
    """Return the modification time of a file; 0 if there is no file."""
    with suppress(OSError):
        return file.stat().st_mtime_ns
    return 0


def _grouped_waits() -> list[Waits]:
    """Return the waits of this process, the oldest first; equal waits are grouped."""
    now = time.monotonic()
    groups = dict[tuple[str, ...], Waits]()
    for w in sorted(waits.table.copy(), key=lambda w: w.since):
        words = (text.partition(" ")[0] for text in (w.what, w.owner))
        key = w.on, *(word if word.isalpha() else "#" for word in words)
        if (group := groups.get(key)) is not None:
            group.count += 1
        elif len(groups) < MAX_GROUPS:
            times = now - w.since, now - w.last_sign
            groups[key] = Waits(w.what, w.owner, w.on, *times, w.seconds, w.replies_soon, w.detail)
    return list(groups.values())


def stacks() -> str:
    """Return the stacks of all other threads and of all tasks of watched event loops.

    One line a stack, innermost call first. Equal stacks share a line, which begins with their
    number.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    groups: dict[tuple[str, str], list[str]] = {}
    for ident, frame in _frames().items():
        if ident == threading.get_ident():
            continue
        path = " < ".join([_location(each, line) for each, line in traceback.walk_stack(frame)])
        groups.setdefault(("thread", path), []).append(names.get(ident, "?"))
    for each in _loops:
        for task in asyncio.all_tasks(each.loop):
            groups.setdefault(("task", _task_path(task)), []).append(task.get_name())
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1])))
    return "".join(f"{len(n)} x {kind} {n[0]}: {path}\n" for (kind, path), n in ordered)


def _task_path(task: asyncio.Task[object]) -> str:
    """Return the stack of a task, which begins at its innermost await."""
    places: list[str] = []
    awaited: object = task.get_coro()
    while awaited is not None:
        kind = next((k for k in ("cr", "gi", "ag") if hasattr(awaited, f"{k}_frame")), None)
        if kind is None or (frame := getattr(awaited, f"{kind}_frame")) is None:
            break
        places.append(_location(frame, frame.f_lineno))
        work = frame.f_locals.get("work") if frame.f_code is waits.Wait.run.__code__ else None
        awaited = work or getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return " < ".join(reversed(places))


def _location(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{line} {code.co_name}"


def _frames() -> dict[int, FrameType]:
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage]
