"""Turns exceptions of environments and agents into failures of episodes."""

import re
from traceback import extract_tb

from arealite.api.rollout_messages import Failure
from arealite.base.errors import EpisodeError, InvariantError, UserError, failure_class

MAX_DETAIL = 500
"""Characters of an error that a Failure keeps."""
PLACE = re.compile(r"\([^()]+:\d+\)\Z")
"""File and line at the end of a Failure's detail."""
FATAL = (InvariantError, UserError)
"""Errors of the run, not of the episode."""


def make_failure(error: BaseException) -> Failure:
    """Return the failure of an episode whose environment or agent raised `error`.

    Its detail ends with file and line if the exception is not an EpisodeError.
    """
    frames = [] if isinstance(error, EpisodeError) else extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    detail = f"{type(error).__name__}: {error}"[:MAX_DETAIL] + where
    return Failure(failure_class(error), detail)


def root_error(error: BaseException) -> BaseException:
    """Return the error inside an exception group: a fatal one if any, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [root_error(inner) for inner in error.exceptions]
    return next((inner for inner in found if isinstance(inner, FATAL)), found[0])
