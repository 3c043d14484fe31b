"""Tells a person why a run does not go on: who holds it up, who waits for whom, what runs where.

One screen, because it is read at night; the launcher prints it, too, before it gives up.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import wrap

from arealite.system.health.diagnosis import ABSENT_S, Finding, Role, WaitGraph, read
from arealite.system.health.vitals import ASK, process, written_ns
from arealite.system.health.waits import ITSELF, OTHER_RANKS

WIDTH = 118
ANSWER_S, SIGNAL_S = 2.0, 0.5
"""How long to wait for the stacks of roles that can write them, and of those that cannot."""
POLL_S = 0.05
MAX_WAITERS, MAX_STACKS, MAX_PLACES, MAX_FRAMES, LOG_LINES = 6, 3, 4, 12, 6
EPISODE = " task episode "
IDLE = (": thread.py:", ": selectors.py:", ": runners.py:")
"""How the stack begins of a pool's thread or of a loop's that has nothing to do."""


def explain(folder: Path, findings: Sequence[Finding], *, logs: Path | None = None) -> str:
    """Describe the roles whose vitals are in `folder`, those of `findings` first.

    Asks every role for its stacks, for up to 2.5 s.
    """
    roles = read(folder)
    if not roles and not findings:
        return f"no process of this run shows itself in {folder}: it is not running."
    stacks, causes = collect_stacks(folder, roles), {each.blocker: each.cause for each in findings}
    roles.sort(key=lambda role: role.name not in causes)
    graph = WaitGraph({role.name: role for role in roles})
    is_over = all(role.state == "X" for role in roles if not role.name.startswith("llm_server"))
    head = "WHO HOLDS THE RUN UP" if findings else f"nobody holds the run up.{_longest(roles)}"
    lines = [_cut("the run itself is not running." if is_over else head)]
    for finding in findings:
        lines += _describe(finding, logs)
    lines += ["", f"{'ROLE':<28} {'PID':>7} {'STATE':<8} {'BEAT':>6} {'LAG':>7}  WAITS FOR"]
    for role in roles:
        state = causes.get(role.name, "gone" if role.state == "X" else "ok")
        lines += [_cut(line) for line in _table_row(role, state, graph)]
    lines += ["", "STACKS (what runs or waits < who called it)"]
    for role in roles:
        found = stacks.get(role.name, [])
        lines += [f"{role.name}:", *(_cut(f"  {line}") for line in found or ["(none to be had)"])]
    return "\n".join([*lines, f"(whole, where a role could tell: {folder}/ROLE.dump)"])


def collect_stacks(folder: Path, roles: Sequence[Role]) -> dict[str, list[str]]:
    """Return the stacks of every role that can still tell them.

    From its vitals' thread; where that is held too, by the signal that works inside C code.
    """
    living = {role.name: role for role in roles if role.state not in ("X", "T", "t")}
    files = {name: folder / role.vitals.stacks for name, role in living.items() if role.state}
    sizes = {name: _size(file) for name, file in files.items()}
    found: dict[str, list[str]] = {}
    with suppress(OSError):
        (folder / ASK).touch()
        asked = (folder / ASK).stat().st_mtime_ns
        dumps = {name: folder / f"{name}.dump" for name in living}
        _until(lambda: all(written_ns(dump) >= asked for dump in dumps.values()), ANSWER_S)
        told = {name: dump for name, dump in dumps.items() if written_ns(dump) >= asked}
        found = {name: _shorten(dump.read_text()) for name, dump in told.items()}
    held = [name for name in files if name not in found and files[name].exists()]
    for name in held:
        vitals = living[name].vitals
        if (process(vitals.pid) or ("", 0))[1] == vitals.started:
            with suppress(OSError):  # another user's, or gone just now
                os.kill(vitals.pid, signal.SIGUSR1)
    _until(lambda: all(_size(files[name]) > sizes[name] for name in held), SIGNAL_S)
    time.sleep(POLL_S if held else 0.0)  # the rest of what has begun to come
    for name in held:
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
        with suppress(OSError):  # of some, somebody else has it
            yield from (f"    | {line}" for line in log.read_text().splitlines()[-LOG_LINES:])
            yield f"    log: {log}"
    for waiter in finding.waiters[:MAX_WAITERS]:
        yield f"    <- {waiter}"
    if (more := len(finding.waiters) - MAX_WAITERS) > 0:
        yield f"    <- and {more} more waits"


def _longest(roles: Sequence[Role]) -> str:
    """Tell the longest wait for what is no role, as an environment: nobody vouches for that."""
    known = {role.name for role in roles} | {ITSELF, OTHER_RANKS}
    found = [
        (wait.waited_s + role.age_s, f"{role.name}: {wait.what} on {wait.on}")
        for role in roles
        for wait in role.vitals.waits
        if wait.on not in known
    ]
    seconds, what = max(found, default=(0.0, ""))
    return f" Longest under way: {what}, {seconds:.1f} s" if seconds > ABSENT_S else ""


def _table_row(role: Role, state: str, graph: WaitGraph) -> Iterator[str]:
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
    """Keep the most frequent stacks of tasks and of threads, and of each its innermost places."""
    lines = [line for line in dump.splitlines() if not any(place in line for place in IDLE)]
    kept = [line for kind in ("task", "thread") for line in _of(kind, lines)[:MAX_STACKS]]
    return [" < ".join(line.split(" < ")[:MAX_PLACES]) for line in kept] or ["(idle)"]


def _of(kind: str, lines: Sequence[str]) -> list[str]:
    found = (line for line in lines if line.split(" ", 3)[2:3] == [kind])
    return sorted(found, key=lambda line: EPISODE not in line)  # what others wrote runs in these


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(POLL_S)
