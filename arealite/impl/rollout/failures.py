"""Turns exceptions of environments and agents into failures of episodes."""

import os
import re
import sysconfig
from traceback import extract_tb

from arealite.api.rollout_messages import Failure
from arealite.base.errors import EpisodeError, InvariantError, UserError, failure_class

MAX_DETAIL = 500
"""Characters of an error that a Failure keeps."""
PLACE = re.compile(r"\([^()]+:\d+\)\Z")
"""File and line at the end of a Failure's detail."""
LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""Folders of the standard library and of installed packages, in which no line is the user's."""
FATAL = (InvariantError, UserError)
"""Errors of the run, not of the episode."""


def make_failure(error: BaseException) -> Failure:
    """Return the failure of an episode whose environment or agent raised `error`.

    Its detail ends with file and line if the exception is not an EpisodeError.
    """
    detail = f"{type(error).__name__}: {error}"[:MAX_DETAIL]
    frames = [] if isinstance(error, EpisodeError) else extract_tb(error.__traceback__)
    if frames:
        user_frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
        last_frame = (user_frames or frames)[-1]
        detail += f" ({last_frame.filename}:{last_frame.lineno})"
    return Failure(failure_class=failure_class(error), detail=detail)


def root_error(error: BaseException) -> BaseException:
    """Return the error inside an exception group: a fatal one if any, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    roots = [root_error(inner) for inner in error.exceptions]
    for root in roots:
        if isinstance(root, FATAL):
            return root
    return roots[0]
