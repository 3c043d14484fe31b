"""The task, a row of the data set as environments get it, and the interface of task samplers."""

import sqlite3
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

import msgspec

from arealite.base.errors import EpisodeError

Row = Mapping[str, object]
"""A row of the data set: `prompt`, `ground_truth` and `extra_info`."""


class Task(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A row of the data set. Filled by the datapipe."""

    task_id: str
    """`<split>-<row>`; a row has the same id in every epoch."""
    prompt: Any
    """The row's `prompt`: a string, or a list of chat messages."""
    ground_truth: str | None
    """The row's `ground_truth`; None if the column is missing or null."""
    extra_info: dict[str, Any]
    """The row's `extra_info`; {} if it is missing."""
    columns: dict[str, Any] = {}
    """The other columns of the row, by the file's names; {} if no reward of the run reads them
    (`Reward.score_task`)."""

    def copy(self) -> "Task":
        """Return a deep copy, whose values can be changed without a change of this task."""
        try:
            return _decode(_encode(self))  # takes a tenth of the time of `deepcopy`
        except (TypeError, ValueError, OverflowError):  # not a row of a file
            return deepcopy(self)

    @property
    def text(self) -> str:
        """The prompt, or the content of its last chat message that is not the assistant's."""
        if isinstance(self.prompt, str):
            return self.prompt
        questions = [message for message in self.prompt if message.get("role") != "assistant"]
        last_message = (questions or self.prompt)[-1]
        return last_message.get("content") or ""

    @property
    def truth(self) -> str:
        """The ground truth, for environments that require one.

        Raises:
            EpisodeError: The row has no ground truth.
        """
        if self.ground_truth is None:
            raise EpisodeError(f"{self.task_id} has no ground_truth, which its environment needs")
        return self.ground_truth

    def eval_samples(self, default: int) -> int:
        """Return the number of samples in an evaluation: `extra_info.pass@k`, if it is an integer
        of at least 1, else `default`."""
        num_samples = self.extra_info.get("pass@k")
        if type(num_samples) is int and num_samples > 0:
            return num_samples
        return default

    @property
    def source(self) -> str:
        """The label by which metrics are grouped: the name of the environment in a run with
        several, else the row's `data_source`, else ""."""
        return str(self.extra_info.get("env") or self.extra_info.get("data_source") or "")


class TaskSampler(Protocol):
    """Draws the next task.

    Its state is read from the ledger, so that a resumed run draws the same tasks as an
    uninterrupted run.
    """

    def load(self, db: sqlite3.Connection) -> None:
        """Load the state from the ledger, at the start and after a roll-back."""
        ...

    def draw(self, seq: int) -> tuple[int, int]:
        """Return the epoch and the row of group number `seq`. The numbers come in order."""
        ...

    def record(self, seq: int, row: int, rewards: Sequence[float | None]) -> None:
        """Note the rewards of a closed group; None stands for a trajectory without a score."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of the draws."""
        ...


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Task).decode
