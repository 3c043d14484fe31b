"""The tree of AReaLite's exceptions. The type of an exception determines its handling.

ArealiteError
├── UserError            wrong input: one line with the fix, exit code 2
├── InvariantError       a broken invariant: the run stops, exit code 3
├── RoleError            a process of the run exited or does not respond: the role that raises
│   │                    it exits with code 4 and is restarted within its budget
│   └── DeadlineError    a named wait reached its deadline
└── EpisodeError         a failed episode: counted by `failure_class`, never rewarded
    ├── EpisodeTimeout       the episode reached its timeout
    ├── RewardTimeout        the reward check reached its timeout
    ├── RewardNotFinite      a reward is infinite or not a number
    ├── ContextOverflow      prompt + max_new_tokens exceed the server's context
    ├── GenerationRefused    the server answered 4xx
    └── ServerUnavailable    no server finished the request before its deadline
"""

from typing import TypeVar, cast


class ArealiteError(Exception):
    """Base class of AReaLite's errors."""

    exit_code = 1


class UserError(ArealiteError):
    """Wrong input, found before any process starts. The message names the fix."""

    exit_code = 2


class InvariantError(ArealiteError):
    """A broken invariant. A run that continues could lose or repeat samples."""

    exit_code = 3


class RoleError(ArealiteError):
    """A process of the run has exited or does not respond. The message names it."""

    exit_code = 4


class DeadlineError(RoleError):
    """A named wait reached its deadline.

    Args:
        waiting_for: The name of the wait.
        owner: The role or component that waits.
        seconds: The deadline.
    """

    def __init__(self, waiting_for: str, *, owner: str, seconds: float) -> None:
        super().__init__(f"{owner} waited {seconds:.1f} s for {waiting_for}")
        self.seconds = seconds


class EpisodeError(ArealiteError):
    """An episode failed. It is retried up to `max_attempts` times; then its group is filtered.

    A subclass names the class that counts it: `class Broken(EpisodeError, failure_class="broken")`.
    """

    failure_class = "episode"

    def __init_subclass__(cls, *, failure_class: str = "") -> None:
        cls.failure_class = failure_class or cls.failure_class


class EpisodeTimeout(EpisodeError, failure_class="episode_timeout"):
    """The episode took longer than `collector.episode_timeout_s`."""


class RewardTimeout(EpisodeError, failure_class="reward_timeout"):
    """The reward check reached its timeout and was killed. The sample has no reward."""


class RewardNotFinite(EpisodeError, failure_class="reward_not_finite"):
    """A reward, one of its parts or their sum is infinite or not a number."""


class ContextOverflow(EpisodeError, failure_class="context_overflow"):
    """The request would not fit the server's context length.

    Args:
        message: What exceeds the context, and the fix.
        room: Number of new tokens for which the context has room.
    """

    def __init__(self, message: str, room: int = 0) -> None:
        super().__init__(message)
        self.room = room


class GenerationRefused(EpisodeError, failure_class="generation_refused"):
    """The server refused the request as invalid."""


class ServerUnavailable(EpisodeError, failure_class="server_unavailable"):
    """No live server finished the request before its deadline."""


E = TypeVar("E", bound=BaseException)


def first_of(error: BaseException, error_class: type[E]) -> E | None:
    """Return the first error of a class in an exception group, or the error itself; else None."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, error_class) else None
    group = cast("BaseExceptionGroup[BaseException]", error)
    for inner in group.exceptions:
        first = first_of(inner, error_class)
        if first is not None:
            return first
    return None


def one_line(error: BaseException) -> str:
    """Return the text of an error on one line, or its type where it has no text."""
    return " ".join((str(error) or repr(error)).split())


def failure_class(error: BaseException) -> str:
    """Return the failure class that counts an episode that failed with `error`."""
    if isinstance(error, EpisodeError):
        return error.failure_class
    return f"error:{type(error).__name__}"
