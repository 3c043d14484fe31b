"""One row of the dataset, as environments get it."""

from __future__ import annotations

from typing import Any

import msgspec

from arealite.base.errors import EpisodeError


class Task(msgspec.Struct, frozen=True):
    """One row of the dataset, as an environment gets it. Filled by the datapipe."""

    task_id: str
    """`<split>-<row>`: the same row has the same id in every epoch."""
    prompt: Any
    """The row's `prompt`: a string, or a list of chat messages."""
    ground_truth: str | None
    """The row's `ground_truth`; None where the column is absent or null."""
    extra_info: dict[str, Any]
    """The row's `extra_info`, {} where absent."""

    @property
    def text(self) -> str:
        """The prompt as a text: of chat messages, what the last one says."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def truth(self) -> str:
        """The ground truth, for environments that require one.

        Raises:
            EpisodeError: the row has no ground truth.
        """
        if self.ground_truth is None:
            raise EpisodeError(f"{self.task_id} has no ground_truth, which its environment needs")
        return self.ground_truth

    @property
    def source(self) -> str:
        """Its environment, where a run has several, else the row's `data_source`; "" where it has
        neither. Metrics are told by it."""
        return str(self.extra_info.get("env") or self.extra_info.get("data_source") or "")
