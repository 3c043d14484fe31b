"""The stacks of a role's threads and tasks, which its vitals thread writes on request."""

import asyncio
import os
import threading
import traceback
from collections import defaultdict
from types import FrameType

from arealite.system.health import vitals, waits


def stacks() -> str:
    """Return the stacks of all other threads and of all tasks of watched event loops.

    It is a hook `role_stacks`.

    One line a stack, innermost call first. Equal stacks share a line, which begins with their
    number.
    """
    names_by_thread = {thread.ident: thread.name for thread in threading.enumerate()}
    names_by_stack = defaultdict[tuple[str, str], list[str]](list)
    for ident, frame in vitals.frames().items():
        if ident == threading.get_ident():
            continue
        calls = [_location(caller, line) for caller, line in traceback.walk_stack(frame)]
        path = " < ".join(calls)
        names_by_stack["thread", path].append(names_by_thread.get(ident, "?"))
    for watched in vitals.loops:
        for task in asyncio.all_tasks(watched.loop):
            names_by_stack["task", task_path(task)].append(task.get_name())
    groups = [(kind, names, path) for (kind, path), names in names_by_stack.items()]
    # Tasks are first; of each kind, the most frequent stack is first.
    groups.sort(key=lambda group: (group[0], -len(group[1])))
    return "".join(f"{len(names)} x {kind} {names[0]}: {path}\n" for kind, names, path in groups)


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
