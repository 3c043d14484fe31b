"""Every exception of AReaLite, as one tree.

One place, so that a boundary can decide by type: refuse and name the fix, stop the run, or count a
failed episode.

    ArealiteError
    ├── UserError            the input is wrong: one line with the fix, exit code 2
    ├── InvariantError       a promise of the system is broken: stop the run, exit code 3
    ├── RoleError            a process of the run died or stopped answering: the role ends with exit
    │   │                    code 4, and is started again within its budget
    │   └── DeadlineError    a named wait took longer than its owner allowed
    └── EpisodeError         one episode failed: data, counted by `failure_class`, never a reward
        ├── EpisodeTimeout       the whole episode
        ├── RewardTimeout        its reward check
        ├── RewardNotFinite      infinity or no number
        ├── ContextOverflow      prompt + max_new_tokens do not fit the server's context
        ├── GenerationRefused    the server answered 4xx
        └── ServerUnavailable    no server could finish the request before its deadline
"""


class ArealiteError(Exception):
    """Root of all errors raised on purpose."""

    exit_code = 1


class UserError(ArealiteError):
    """Wrong input, found before anything was started; the message names the fix."""

    exit_code = 2


class InvariantError(ArealiteError):
    """Something that must always hold does not; continuing could lose or repeat samples."""

    exit_code = 3


class RoleError(ArealiteError):
    """A process of the run is gone or silent; the message names it."""

    exit_code = 4


class DeadlineError(RoleError):
    """A wait with a name and an owner ran out of time."""

    def __init__(self, waiting_for: str, *, owner: str, seconds: float) -> None:
        super().__init__(f"{owner} waited {seconds:.1f} s for {waiting_for}")
        self.waiting_for = waiting_for
        self.owner = owner
        self.seconds = seconds


class EpisodeError(ArealiteError):
    """One episode could not be finished; retried a bounded number of times, then filtered."""

    failure_class = "episode"


class EpisodeTimeout(EpisodeError):
    """The episode ran past `collector.episode_timeout_s`."""

    failure_class = "episode_timeout"


class RewardTimeout(EpisodeError):
    """The reward check ran past its limit and was killed; the sample has no reward."""

    failure_class = "reward_timeout"


class RewardNotFinite(EpisodeError):
    """A reward, a part of one or their sum is infinity or no number."""

    failure_class = "reward_not_finite"


class ContextOverflow(EpisodeError):
    """The request would not fit the server's context length."""

    failure_class = "context_overflow"


class GenerationRefused(EpisodeError):
    """The server refused the request as invalid."""

    failure_class = "generation_refused"


class ServerUnavailable(EpisodeError):
    """No live server finished the request before its deadline."""

    failure_class = "server_unavailable"


def failure_class(error: BaseException) -> str:
    """Name the class under which a failed episode is counted."""
    if isinstance(error, EpisodeError):
        return error.failure_class
    return f"error:{type(error).__name__}"
