"""The process that checks answers: a warm parent that forks the child which does the work.

Killing the child mid-check is the only sure end of a pathological answer; forking the next from a
parent that has math-verify loaded takes milliseconds instead of a second. `pool.py` runs this as a
script; it imports nothing of the package.

A line of JSON on stdin, [completion, truth, seconds], is answered by one on stdout: the verdict, or
"timeout" or "died", of the child that had the check.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

MEMORY_BYTES = 4 << 30
PR_SET_PDEATHSIG = 1


def is_equal(completion: str, truth: str) -> bool:
    """Return whether the last answer in `completion` equals `truth`, by math-verify.

    `truth` is an answer, LaTeX or plain, not a worked solution. Only when it does not parse as
    LaTeX is it searched for an answer like the completion. No time limit here: the pool kills.
    """
    import math_verify

    parse: Any = math_verify.parse  # None, no limit, is allowed and documented, but not typed
    verify: Any = math_verify.verify
    gold = parse(f"\\boxed{{{truth}}}", fallback_mode="no_fallback", parsing_timeout=None)
    gold = gold or parse(truth, parsing_timeout=None)
    answer = parse(completion, parsing_timeout=None)
    return bool(verify(gold, answer, timeout_seconds=None))


def main() -> None:
    """Have a child answer requests until the end of stdin, and fork the next when it failed."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    is_equal("$\\frac{1}{2}$", "0.5")
    context = multiprocessing.get_context("fork")
    child = pipe = None
    for line in sys.stdin.buffer:
        if child is None or pipe is None:
            pipe, theirs = context.Pipe()
            child = context.Process(target=serve, args=(theirs, pipe, os.getpid()), daemon=True)
            child.start()
            theirs.close()
        *question, seconds = json.loads(line)
        try:
            pipe.send(question)
            answer = pipe.recv() if pipe.poll(seconds) else "timeout"
        except (EOFError, OSError):
            answer = "died"
        if not isinstance(answer, bool):
            child.kill()
            child.join()
            child = None
        answers.write(json.dumps(answer).encode() + b"\n")


def serve(pipe: Connection, parents: Connection, parent: int) -> None:
    """Be a child."""
    die_with_parent(parent)
    parents.close()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send(is_equal(*pipe.recv()))


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent is gone; elsewhere the closed pipe ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
