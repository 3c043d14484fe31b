"""The reason for the end of a vLLM server: the last error of its engine or of a worker.

The HTTP process writes it long before its own traceback, which ends in "See root cause above".
"""

import re

from arealite.base.exit_record import MAX_REASON

ENGINE_ERROR = re.compile(
    r"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\[]*\[[^\]]*\] (\w*(?:Error|Exception)\b.*)$",
    re.MULTILINE,
)
"""The line of an exception in a traceback that vLLM logs."""
CONSEQUENCE = "root cause"
"""In errors of a process about the end of another one."""


def engine_error(output: str, code: int) -> str | None:
    """Return the last error of vLLM's engine or workers, None for none.

    It is a hook `exit_reason`.

    Args:
        output: What the process wrote.
        code: Its exit code; for a death by signal, the signal's number below zero.
    """
    if code <= 0:
        return None
    errors: list[str] = ENGINE_ERROR.findall(output)
    causes = [error for error in errors if CONSEQUENCE not in error]
    return " ".join(causes[-1].split())[:MAX_REASON] if causes else None
