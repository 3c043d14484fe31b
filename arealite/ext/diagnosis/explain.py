"""Text of `arealite why`: the blocking roles, the waits of all roles, and their stacks.

The text fits on one screen. The launcher prints it, too, before it gives up (hook `run_failed`).
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import wrap

from arealite.api.findings import Finding
from arealite.ext.diagnosis.diagnosis import ABSENT_S, WaitGraph, examine
from arealite.system.health.vitals import (
    STACKS_REQUEST,
    RoleStatus,
    Waits,
    modified_ns,
    process_state,
    read_roles,
)
from arealite.system.health.waits import ITSELF, OTHER_RANKS

WIDTH = 118
ANSWER_S = 2.0
"""How long to wait for stacks that roles write."""
SIGNAL_S = 0.5
"""How long to wait for stacks that faulthandler writes."""
POLL_S = 0.05
MAX_WAITERS = 6
MAX_STACKS = 3
MAX_PLACES = 4
MAX_FRAMES = 12
DETAIL_INDENT = 12
LOG_LINES = 6
EPISODE = " task episode "
IDLE = (": thread.py:", ": selectors.py:", ": runners.py:")
"""The innermost calls of idle threads: of a thread pool, and of an event loop."""


def explain_blockers(folder: Path, logs: Path) -> str:
    """Return the text about a run that fails; "" if no role blocks it."""
    findings = examine(folder)
    return explain(folder, findings, logs=logs) if findings else ""


def explain(folder: Path, findings: Sequence[Finding], *, logs: Path | None = None) -> str:
    """Return one screen of text about the roles whose vitals are in `folder`.

    It requests the stacks of every role and waits for them for up to 2.5 s.

    Args:
        folder: Folder of the vitals.
        findings: The blocking roles; they come first.
        logs: Folder of the roles' logs; None: show no logs.
    """
    roles = read_roles(folder)
    if not roles and not findings:
        return f"The run is not running: no process writes vitals to {folder}."
    stacks = collect_stacks(folder, roles)
    causes = {finding.blocker: finding.cause for finding in findings}
    roles.sort(key=lambda role: role.name not in causes)
    lines = [_truncate(_headline(roles, findings))]
    for finding in findings:
        lines += _describe(finding, logs)
    lines.append("")
    lines.append(f"{'ROLE':<28} {'PID':>7} {'STATE':<8} {'BEAT':>6} {'LAG':>7}  WAITS FOR")
    graph = WaitGraph({role.name: role for role in roles})
    for role in roles:
        state = causes.get(role.name, "gone" if role.state == "X" else "ok")
        lines += [_truncate(line) for line in _table_row(role, state, graph)]
    lines.append("")
    lines.append("STACKS (innermost call < its caller)")
    for role in roles:
        lines.append(f"{role.name}:")
        stacks_of_role = stacks.get(role.name) or ["(no reply)"]
        lines += [_truncate(f"  {stack}") for stack in stacks_of_role]
    lines.append(f"(complete stacks of roles that replied: {folder}/ROLE.dump)")
    return "\n".join(lines)


def _headline(roles: Sequence[RoleStatus], findings: Sequence[Finding]) -> str:
    """Return the first line: whether the run is running, and whether roles block it."""
    of_run = [role for role in roles if not role.name.startswith("llm_server")]
    if all(role.state == "X" for role in of_run):
        return "The run is not running."
    if findings:
        return "BLOCKING ROLES"
    return f"No role blocks the run.{_longest_wait(roles)}"


def collect_stacks(folder: Path, roles: Sequence[RoleStatus]) -> dict[str, list[str]]:
    """Return the stacks of every role that replies, by role name.

    The vitals thread of a role writes them. If it does not reply, SIGUSR1 makes faulthandler write
    them, which works inside C code.
    """
    living = [role for role in roles if role.state not in ("X", "T", "t")]
    of_this_host = [role for role in living if role.state]
    files = [_StacksFile(role, folder / role.vitals.stacks) for role in of_this_host]
    stacks: dict[str, list[str]] = {}
    with suppress(OSError):
        stacks = _request_stacks(folder, [role.name for role in living])
    blocked = [file for file in files if file.role.name not in stacks and file.path.exists()]
    for file in blocked:
        _send_signal(file.role)
    _wait_until(lambda: all(file.has_grown() for file in blocked), SIGNAL_S)
    time.sleep(POLL_S if blocked else 0.0)  # faulthandler writes in pieces
    for file in blocked:
        with suppress(OSError):
            stacks[file.role.name] = file.read_new()[:MAX_FRAMES]
    return stacks


def _request_stacks(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Make the vitals threads of all roles write their stacks; return those written in time.

    Raises:
        OSError: The folder or a file is not accessible.
    """
    request = folder / STACKS_REQUEST
    request.touch()
    since_ns = request.stat().st_mtime_ns
    dumps = {name: folder / f"{name}.dump" for name in names}

    def replied() -> list[str]:
        return [name for name, dump in dumps.items() if modified_ns(dump) >= since_ns]

    _wait_until(lambda: len(replied()) == len(dumps), ANSWER_S)
    return {name: _shorten(dumps[name].read_text()) for name in replied()}


class _StacksFile:
    """The file to which faulthandler appends the stacks of a role of this host."""

    def __init__(self, role: RoleStatus, path: Path) -> None:
        self.role = role
        self.path = path
        self._old_bytes = _size(path)

    def has_grown(self) -> bool:
        return _size(self.path) > self._old_bytes

    def read_new(self) -> list[str]:
        """Return the lines that were appended to the file."""
        new_bytes = self.path.read_bytes()[self._old_bytes :]
        return new_bytes.decode(errors="replace").splitlines()


def _send_signal(role: RoleStatus) -> None:
    """Make faulthandler write the stacks of a role, unless another process has its id."""
    vitals = role.vitals
    _, started = process_state(vitals.pid) or ("", 0)
    if started == vitals.started:
        with suppress(OSError):  # it belongs to another user, or has just exited
            os.kill(vitals.pid, signal.SIGUSR1)


def _describe(finding: Finding, logs: Path | None) -> Iterator[str]:
    """Yield the lines about a blocking role: its state, its stack or log, and its waiters."""
    since = f" for {finding.since_s:.1f} s" if finding.since_s else ""
    yield f"* {finding.blocker} is {finding.cause.upper()}{since}: {finding.detail}"
    for line in finding.stack.rstrip().splitlines()[-MAX_FRAMES:]:
        yield f"    {line}"
    if finding.cause in ("dead", "crashing") and logs is not None:
        log = logs / f"{finding.blocker}.log"
        with suppress(OSError):  # some roles have no log in this folder
            for line in log.read_text().splitlines()[-LOG_LINES:]:
                yield f"    | {line}"
            yield f"    log: {log}"
    for waiter in finding.waiters[:MAX_WAITERS]:
        yield f"    <- {waiter}"
    num_hidden = len(finding.waiters) - MAX_WAITERS
    if num_hidden > 0:
        yield f"    <- and {num_hidden} more waits"


def _longest_wait(roles: Sequence[RoleStatus]) -> str:
    """Describe the longest wait for anything but a role, for example for an environment."""
    role_names = {role.name for role in roles} | {ITSELF, OTHER_RANKS}
    waits = [
        (wait.waited_s + role.age_s, f"{role.name}: {wait.event} on {wait.on}")
        for role in roles
        for wait in role.vitals.waits
        if wait.on not in role_names
    ]
    waited_s, description = max(waits, default=(0.0, ""))
    return f" Longest wait: {description}, {waited_s:.1f} s" if waited_s > ABSENT_S else ""


def _table_row(role: RoleStatus, state: str, graph: WaitGraph) -> Iterator[str]:
    """Yield the lines of a role in the table: one or more for each of its waits."""
    vitals = role.vitals
    head = f"{role.name:<28} {vitals.pid:>7} {state:<8} {role.age_s:>4.1f} s "
    head += f"{vitals.lag_s * 1000:>4.0f} ms  "
    if not vitals.waits:
        yield f"{head}-"
    for wait in vitals.waits:
        description = _describe_wait(role, wait, graph)
        for line in wrap(description, WIDTH - len(head), subsequent_indent="  "):
            yield head + line
            head = " " * len(head)
        for line in wrap(wait.detail, WIDTH - DETAIL_INDENT):
            yield " " * DETAIL_INDENT + line


def _describe_wait(role: RoleStatus, wait: Waits, graph: WaitGraph) -> str:
    description = f"{wait.count} x {wait.event}" if wait.count > 1 else wait.event
    on = wait.on
    if on == OTHER_RANKS:
        on = ", ".join(sorted(graph.targets(role, wait))) or on
    if on != ITSELF:
        description += f" on {on}"
    description += f", {wait.waited_s + role.age_s:.1f} s"
    if wait.seconds:
        description += f" of {wait.seconds:.0f} s"
    return description


def _shorten(dump: str) -> list[str]:
    """Keep the most frequent stacks of tasks and threads, and the innermost calls of each."""
    lines = [line for line in dump.splitlines() if not _is_idle(line)]
    shortened = [
        " < ".join(line.split(" < ")[:MAX_PLACES])
        for kind in ("task", "thread")
        for line in _of_kind(kind, lines)[:MAX_STACKS]
    ]
    return shortened or ["(idle)"]


def _is_idle(line: str) -> bool:
    return any(call in line for call in IDLE)


def _of_kind(kind: str, lines: Sequence[str]) -> list[str]:
    """Return the stacks of one kind, "task" or "thread", those of episodes first.

    A line is "COUNT x KIND NAME: STACK". The user's code runs in episodes.
    """
    of_kind = [line for line in lines if line.split(" ", 3)[2:3] == [kind]]
    return sorted(of_kind, key=lambda line: EPISODE not in line)


def _truncate(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(POLL_S)
