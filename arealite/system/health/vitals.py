"""Writes the vitals of a process to a file: heartbeat, waits, event loop lag, CPU times.

A separate thread writes them, because the rest of the process may hang. Errors of this thread are
suppressed. `read_roles` reads the files, for the launcher and for extensions.
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from arealite.base import entries, log, signals
from arealite.base.exit_record import COLLECTIVES
from arealite.base.files import folder_time, replacing
from arealite.system.health import waits

if TYPE_CHECKING:
    from arealite.api.launcher_hooks import RoleStacks

logger = log.get(__name__)

PROC = Path("/proc")
BEAT_S = 1.0
TICK_S = 0.1
"""Seconds between two timer callbacks in a watched event loop."""
BLOCKED_S = 1.0
"""An event loop that runs no callback for this long is reported as blocked."""
FORGET_DEAD_S = 60.0
"""A role that died this long ago is reported only if another role waits for it."""
MAX_GROUPS = 30
STACK_FRAMES = 12
STACKS_REQUEST = "ask"
"""Name of a file in the vitals folder. A new modification time makes every role write its stacks.
"""


class CpuTimes(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Scheduler statistics of a thread."""

    clock: float
    """Time of reading, by the monotonic clock."""
    ran_s: float
    """Seconds on a CPU."""
    waited_s: float
    """Seconds in the run queue. A wait for a CPU is added when it ends."""
    num_slices: float
    """Number of time slices."""


class Waits(msgspec.Struct, kw_only=True):
    """Equal waits of one process: the oldest, and how many there are."""

    event: str = msgspec.field(name="what")
    owner: str
    on: str
    waited_s: float
    quiet_s: float
    """Seconds since the last sign of life of the role in `on`."""
    seconds: float | None
    replies_soon: bool
    detail: str
    count: int = 1
    stopped_pid: int = 0


class Vitals(msgspec.Struct, kw_only=True):
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
        self.lag_s = 0.0
        self.lag_max_s = 0.0
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


loops: list[LoopWatch] = []
"""The watched event loops of this process."""


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """Measure the lag of an event loop that runs, or will run, in this thread."""
    loops[:] = [watched for watched in loops if not watched.loop.is_closed()]
    loops.append(LoopWatch(loop))


def lag_max_s() -> float:
    """Return the largest lag of this process's watched event loops since their start."""
    return max((watched.lag_max_s for watched in loops), default=0.0)


class Recorder(threading.Thread):
    """Thread that writes `folder`/`name`.json once a second until `close`."""

    def __init__(self, name: str, folder: Path) -> None:
        # A thread starts with an empty context; the context holds the role name of log lines.
        context = contextvars.copy_context()
        super().__init__(
            target=lambda: context.run(self._beat_forever),
            name="vitals",
            daemon=True,
        )
        self.folder = folder
        pid = os.getpid()
        _, started = process_state(pid) or ("", 0)
        self.vitals = Vitals(
            name=name,
            pid=pid,
            host=socket.gethostname(),
            started=started,
            stacks=f"{name}.stacks",
        )
        self._closed = threading.Event()
        self._was_blocked = False
        self._awake_since = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (folder / self.vitals.stacks).open("wb")
        # `close` restores this state: `arealite why` may send SIGUSR1 to a role that exits.
        signals.ignore(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._request_ns = modified_ns(self.folder / STACKS_REQUEST)
        # They are imported now: when a role hangs, an import could hang, too.
        self._describers: list[RoleStacks] = entries.hooks("role_stacks")
        self.beat()

    def beat(self) -> None:
        """Write the vitals once, and the stacks if they were requested."""
        self._update_vitals()
        try:
            self._write("json", msgspec.json.encode(self.vitals))
        except OSError:  # on a full disk, renew the modification time of the old file
            os.utime(self.folder / f"{self.vitals.name}.json")
        request_ns = modified_ns(self.folder / STACKS_REQUEST)
        if request_ns != self._request_ns:
            self._request_ns = request_ns
            dump = "".join(describe_stacks() for describe_stacks in self._describers)
            self._write("dump", dump.encode())

    def _update_vitals(self) -> None:
        vitals = self.vitals
        previous_beat = vitals.clock
        vitals.clock = time.monotonic()
        vitals.lag_s = max((watched.lag_s for watched in loops), default=0.0)
        for watched in loops:
            watched.lag_s = 0.0
        vitals.waits = _grouped_waits()
        vitals.counters = waits.counters | {"in_collective": float(_is_in_collective())}
        # A process that missed a beat was stopped or blocked as a whole.
        has_slept = vitals.clock - previous_beat > 2 * BEAT_S
        vitals.blocked_s = 0.0
        vitals.blocked_stack = ""
        if not has_slept:
            self._check_loops()
        this_thread = threading.get_native_id()
        vitals.cpu[this_thread] = cpu_times(vitals.pid, this_thread)
        if not vitals.blocked_s:
            vitals.cpu[vitals.pid] = cpu_times(vitals.pid, vitals.pid)
        if has_slept or max(vitals.blocked_s, vitals.lag_s) > BLOCKED_S:
            self._awake_since = vitals.clock
        vitals.awake_s = vitals.clock - self._awake_since

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
        """Record the event loop that has been blocked for longest; log the begin of the block."""
        worst = max(loops, key=LoopWatch.blocked_s, default=None)
        blocked_s = worst.blocked_s() if worst is not None else 0.0
        if worst is None or blocked_s < BLOCKED_S:
            self._was_blocked = False
            return
        frame = frames().get(worst.thread)
        stack = "".join(traceback.format_stack(frame)[-STACK_FRAMES:])
        self.vitals.blocked_s = blocked_s
        self.vitals.blocked_stack = stack
        if not self._was_blocked:
            self._was_blocked = True
            logger.warning("event loop blocked", seconds=round(blocked_s, 1), stack=stack)

    def _write(self, suffix: str, content: bytes) -> None:
        """Replace a file atomically."""
        file = self.folder / f"{self.vitals.name}.{suffix}"
        with replacing(file) as temporary:
            temporary.write_bytes(content)


def _is_in_collective() -> bool:
    """Return whether the main thread is in a collective of torch."""
    frame = frames().get(threading.main_thread().ident or 0)
    return frame is not None and COLLECTIVES in frame.f_code.co_filename


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


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP or a debugger stopped a process."""
    state = (process_state(pid) or "X")[0]
    return state in "Tt"


def cpu_times(pid: int, thread: int) -> CpuTimes | None:
    """Return a thread's scheduler statistics; None if the thread exited, or if the kernel has no
    such statistics (gVisor)."""
    with suppress(OSError, ValueError):
        schedstat = (PROC / f"{pid}/task/{thread}/schedstat").read_text()
        ran_ns, waited_ns, num_slices = map(int, schedstat.split())
        if num_slices:
            return CpuTimes(
                clock=time.monotonic(),
                ran_s=ran_ns / 1e9,
                waited_s=waited_ns / 1e9,
                num_slices=num_slices,
            )
    return None


def modified_ns(file: Path) -> int:
    """Return the modification time of a file; 0 if there is no file."""
    with suppress(OSError):
        return file.stat().st_mtime_ns
    return 0


def _grouped_waits() -> list[Waits]:
    """Return the waits of this process, the oldest first; equal waits are grouped."""
    now = time.monotonic()
    groups = dict[tuple[str, str, str], Waits]()
    for wait in sorted(waits.table.copy(), key=lambda wait: wait.since):
        key = (wait.on, _kind_word(wait.event), _kind_word(wait.owner))
        if key in groups:
            groups[key].count += 1
        elif len(groups) < MAX_GROUPS:
            groups[key] = Waits(
                event=wait.event,
                owner=wait.owner,
                on=wait.on,
                waited_s=now - wait.since,
                quiet_s=now - wait.last_sign,
                seconds=wait.seconds,
                replies_soon=wait.replies_soon,
                detail=wait.detail,
                stopped_pid=wait.stopped_pid,
            )
    return list(groups.values())


def _kind_word(name: str) -> str:
    """Return the first word of a name, which names its kind; "#" if it has other than letters."""
    word = name.partition(" ")[0]
    return word if word.isalpha() else "#"


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread."""
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """State of one process, from its vitals and from the kernel."""

    vitals: Vitals
    age_s: float
    """Seconds since the last heartbeat."""
    state: str
    """The kernel's state letter of the process; "X" if it is gone, "" if it is on another host."""

    @property
    def name(self) -> str:
        return self.vitals.name

    @property
    def is_alive(self) -> bool:
        """Whether the process exists; on another host, whether its heartbeat is recent."""
        return self.state not in "XZ" if self.state else self.age_s < FORGET_DEAD_S


def read_roles(folder: Path) -> list[RoleStatus]:
    """Read the vitals in `folder`, and the kernel's state of each process of this host."""
    roles: list[RoleStatus] = []
    now = folder_time(folder)
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            vitals = msgspec.json.decode(path.read_bytes(), type=Vitals)
            age_s = now - path.stat().st_mtime
        except (OSError, msgspec.DecodeError):
            continue  # removed in the meantime
        state = ""
        if vitals.host == socket.gethostname():
            age_s = min(age_s, time.monotonic() - vitals.clock)
            state = _kernel_state(vitals)
        roles.append(RoleStatus(vitals=vitals, age_s=max(0.0, age_s), state=state))
    return roles


def _kernel_state(vitals: Vitals) -> str:
    """Return the state letter of a process of this host; "X" if it is gone, "" if unknown."""
    if not vitals.started:
        return ""
    process = process_state(vitals.pid)
    if process is None:
        return "X"
    state, started = process
    return state if started == vitals.started else "X"
