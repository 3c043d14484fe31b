"""The process that checks answers: a warm parent that forks the child which does the work.

Killing the child mid-check is the only sure end of a pathological answer; forking the next from a
parent that has math-verify loaded takes milliseconds instead of a second. `pool.py` runs this as a
script; it imports nothing of the package.

Lines of JSON on stdin and stdout. A new child says {"pid": 7} and ignores what it reads up to
{"go": 7}: whatever its predecessor left unread in the pipe. Then {"completion", "truth"} is
answered with {"equal"}.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

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
    """Fork children, one after the other, until one ends by itself: its stdin was closed."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    is_equal("$\\frac{1}{2}$", "0.5")
    status = 1
    while status != 0:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            serve(sys.stdin.buffer, answers)
            os._exit(0)
        _, status = os.waitpid(pid, 0)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the end of file."""
    answers.write(b'{"pid": %d}\n' % os.getpid())
    go = b'{"go": %d}\n' % os.getpid()
    while (line := requests.readline()) != go:
        if not line:
            return
    for line in requests:
        request = json.loads(line)
        equal = is_equal(request["completion"], request["truth"])
        answers.write(json.dumps({"equal": equal}).encode() + b"\n")


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent is gone; elsewhere the closed pipe ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
