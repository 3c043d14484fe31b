"""Text of `arealite why`: the blocking roles, the waits of all roles, and their stacks.

The text fits on one screen. The launcher prints it, too, before it gives up.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import wrap

from arealite.system.health.diagnosis import ABSENT_S, Finding, RoleStatus, WaitGraph, read_roles
from arealite.system.health.vitals import STACKS_REQUEST, modified_ns, process_state
from arealite.system.health.waits import ITSELF, OTHER_RANKS

WIDTH = 118
ANSWER_S, SIGNAL_S = 2.0, 0.5
"""How long to wait for stacks that roles write, and for stacks that faulthandler writes."""
POLL_S = 0.05
MAX_WAITERS = 6
MAX_STACKS = 3
MAX_PLACES = 4
MAX_FRAMES = 12
LOG_LINES = 6
EPISODE = " task episode "
IDLE = (": thread.py:", ": selectors.py:", ": runners.py:")
"""The innermost calls of idle threads: of a thread pool, and of an event loop."""


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
    causes = {each.blocker: each.cause for each in findings}
    roles.sort(key=lambda role: role.name not in causes)
    graph = WaitGraph({role.name: role for role in roles})
    is_over = all(role.state == "X" for role in roles if not role.name.startswith("llm_server"))
    head = "BLOCKING ROLES" if findings else f"No role blocks the run.{_longest_wait(roles)}"
    lines = [_truncate("The run is not running." if is_over else head)]
    for finding in findings:
        lines += _describe(finding, logs)
    lines += ["", f"{'ROLE':<28} {'PID':>7} {'STATE':<8} {'BEAT':>6} {'LAG':>7}  WAITS FOR"]
    for role in roles:
        state = causes.get(role.name, "gone" if role.state == "X" else "ok")
        lines += [_truncate(line) for line in _table_row(role, state, graph)]
    lines += ["", "STACKS (innermost call < its caller)"]
    for role in roles:
        found = stacks.get(role.name, [])
        lines += [f"{role.name}:", *(_truncate(f"  {line}") for line in found or ["(no reply)"])]
    return "\n".join([*lines, f"(complete stacks of roles that replied: {folder}/ROLE.dump)"])


def collect_stacks(folder: Path, roles: Sequence[RoleStatus]) -> dict[str, list[str]]:
    """Return the stacks of every role that replies, by role name.

    The vitals thread of a role writes them. If it does not reply, SIGUSR1 makes faulthandler write
    them, which works inside C code.
    """
    living = {role.name: role for role in roles if role.state not in ("X", "T", "t")}
    files = {name: folder / role.vitals.stacks for name, role in living.items() if role.state}
    sizes = {name: _size(file) for name, file in files.items()}
    found: dict[str, list[str]] = {}
    with suppress(OSError):
        (folder / STACKS_REQUEST).touch()
        since_ns = (folder / STACKS_REQUEST).stat().st_mtime_ns
        dumps = {name: folder / f"{name}.dump" for name in living}
        _wait_until(lambda: all(modified_ns(dump) >= since_ns for dump in dumps.values()), ANSWER_S)
        replied = {name: dump for name, dump in dumps.items() if modified_ns(dump) >= since_ns}
        found = {name: _shorten(dump.read_text()) for name, dump in replied.items()}
    blocked = [name for name in files if name not in found and files[name].exists()]
    for name in blocked:
        vitals = living[name].vitals
        if (process_state(vitals.pid) or ("", 0))[1] == vitals.started:
            with suppress(OSError):  # it belongs to another user, or has just exited
                os.kill(vitals.pid, signal.SIGUSR1)
    _wait_until(lambda: all(_size(files[name]) > sizes[name] for name in blocked), SIGNAL_S)
    time.sleep(POLL_S if blocked else 0.0)  # faulthandler writes in pieces
    for name in blocked:
        with suppress(OSError):
            text = files[name].read_bytes()[sizes[name] :].decode(errors="replace")
            found[name] = text.splitlines()[:MAX_FRAMES]
    return found


def _describe(finding: Finding, logs: Path | None) -> Iterator[str]:
    since = f" for {finding.since_s:.1f} s" if finding.since_s else ""
    yield f"* {finding.blocker} is {finding.cause.upper()}{since}: {finding.detail}"
    yield from (f"    {line}" for line in finding.stack.rstrip().splitlines()[-MAX_FRAMES:])
    if finding.cause in ("dead", "crashing") and logs is not None:
        log = logs / f"{finding.blocker}.log"
        with suppress(OSError):  # some roles have no log in this folder
            yield from (f"    | {line}" for line in log.read_text().splitlines()[-LOG_LINES:])
            yield f"    log: {log}"
    for waiter in finding.waiters[:MAX_WAITERS]:
        yield f"    <- {waiter}"
    if (more := len(finding.waiters) - MAX_WAITERS) > 0:
        yield f"    <- and {more} more waits"


def _longest_wait(roles: Sequence[RoleStatus]) -> str:
    """Describe the longest wait for anything but a role, for example for an environment."""
    known = {role.name for role in roles} | {ITSELF, OTHER_RANKS}
    found = [
        (wait.waited_s + role.age_s, f"{role.name}: {wait.what} on {wait.on}")
        for role in roles
        for wait in role.vitals.waits
        if wait.on not in known
    ]
    seconds, what = max(found, default=(0.0, ""))
    return f" Longest wait: {what}, {seconds:.1f} s" if seconds > ABSENT_S else ""


def _table_row(role: RoleStatus, state: str, graph: WaitGraph) -> Iterator[str]:
    vitals = role.vitals
    head = f"{role.name:<28} {vitals.pid:>7} {state:<8} {role.age_s:>4.1f} s "
    head += f"{vitals.lag_s * 1000:>4.0f} ms  "
    if not vitals.waits:
        yield f"{head}-"
    for wait in vitals.waits:
        on = wait.on
        if on == OTHER_RANKS:
            on = ", ".join(sorted(graph.targets(role, wait))) or on
        text = f"{wait.count} x {wait.what}" if wait.count > 1 else wait.what
        text += "" if on == ITSELF else f" on {on}"
        text += f", {wait.waited_s + role.age_s:.1f} s"
        text += f" of {wait.seconds:.0f} s" if wait.seconds else ""
        for line in wrap(text, WIDTH - len(head), subsequent_indent="  "):
            yield head + line
            head = " " * len(head)
        yield from (" " * 12 + line for line in wrap(wait.detail, WIDTH - 12))


def _shorten(dump: str) -> list[str]:
    """Keep the most frequent stacks of tasks and threads, and the innermost calls of each."""
    lines = [line for line in dump.splitlines() if not any(place in line for place in IDLE)]
    kept = [line for kind in ("task", "thread") for line in _of_kind(kind, lines)[:MAX_STACKS]]
    return [" < ".join(line.split(" < ")[:MAX_PLACES]) for line in kept] or ["(idle)"]


def _of_kind(kind: str, lines: Sequence[str]) -> list[str]:
    found = (line for line in lines if line.split(" ", 3)[2:3] == [kind])
    return sorted(found, key=lambda line: EPISODE not in line)  # the user's code runs in episodes


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
