"""The stacks of a role's threads and tasks, which its vitals thread writes on request."""

import asyncio
import os
import threading
import traceback
from types import FrameType

from arealite.system.health import vitals, waits


def stacks() -> str:
    """Return the stacks of all other threads and of all tasks of watched event loops.

    It is a hook `role_stacks`.

    One line a stack, innermost call first. Equal stacks share a line, which begins with their
    number.
    """
    names_by_thread = {thread.ident: thread.name for thread in threading.enumerate()}
    names_by_path: dict[str, dict[str, list[str]]] = {"task": {}, "thread": {}}
    for ident, frame in vitals.frames().items():
        if ident == threading.get_ident():
            continue
        calls = [_location(caller, line) for caller, line in traceback.walk_stack(frame)]
        path = " < ".join(calls)
        names = names_by_path["thread"].setdefault(path, [])
        names.append(names_by_thread.get(ident, "?"))
    for watched in vitals.loops:
        for task in asyncio.all_tasks(watched.loop):
            names = names_by_path["task"].setdefault(task_path(task), [])
            names.append(task.get_name())
    lines: list[str] = []
    for kind, groups in names_by_path.items():
        most_frequent_first = sorted(groups.items(), key=lambda group: -len(group[1]))
        for path, names in most_frequent_first:
            lines.append(f"{len(names)} x {kind} {names[0]}: {path}\n")
    return "".join(lines)


def task_path(task: asyncio.Task[object]) -> str:
    """Return the stack of a task, which begins at its innermost await."""
    calls: list[str] = []
    awaited: object = task.get_coro()
    while awaited is not None:
        kind = _awaitable_kind(awaited)
        if kind is None:
            break
        frame: FrameType | None = getattr(awaited, f"{kind}_frame")
        if frame is None:
            break
        calls.append(_location(frame, frame.f_lineno))
        awaits = "gi_yieldfrom" if kind == "gi" else f"{kind}_await"
        awaited = getattr(awaited, awaits)
        if frame.f_code is waits.Wait.run.__code__:  # it resumes the coroutine `work` itself
            awaited = frame.f_locals.get("work") or awaited
    return " < ".join(reversed(calls))


def _awaitable_kind(awaited: object) -> str | None:
    """Return the prefix of an awaitable's attributes: coroutine, generator, async generator.

    Returns:
        None if the awaitable has no frame, as a future.
    """
    for kind in ("cr", "gi", "ag"):
        if hasattr(awaited, f"{kind}_frame"):
            return kind
    return None


def _location(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{line} {code.co_name}"
