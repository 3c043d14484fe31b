"""Facts about offline trainers that the core reads without the packages that train.

An offline trainer learns from existing rows, without servers, workers and datapipe. It has the
options `trainer.offline`. Its name has an entry in the group `offline_run`.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from arealite.api.engine_config import Head
from arealite.base import entries

if TYPE_CHECKING:
    from arealite.api.experiment_config import ExperimentConfig

GROUP = "offline_run"


class CheckedRows(NamedTuple):
    """The result of `OfflineRun.check_rows`."""

    identity: dict[str, str]
    """Names and values that must not change within the trial."""
    untrained: Sequence[str]
    """Places of rows that are not trained, because their context fills `max_tokens`."""
    unread: str
    """Names of columns and of keys of messages that nothing reads, as a text; "" without any."""


class OfflineRun(Protocol):
    """The checks of an offline trainer before its process starts."""

    @property
    def head(self) -> Head:
        """The head of the trained model."""
        ...

    def check_options(self, config: "ExperimentConfig") -> None:
        """Check the constraints between the options.

        Raises:
            UserError: A constraint does not hold.
        """
        ...

    def check_rows(self, config: "ExperimentConfig", model: dict[str, Any]) -> CheckedRows:
        """Check that the rows can be used, and other models that the options name.

        Args:
            config: The experiment.
            model: The model's config.json.

        Raises:
            UserError: A row or a model cannot be used, or no row of a split is trained.
        """
        ...

    def describe_rows(self, config: "ExperimentConfig") -> Iterator[tuple[str, str]]:
        """Yield (heading, text) about the rows."""
        ...


def is_offline(trainer: str) -> bool:
    """Return whether a trainer's name is that of an offline trainer."""
    return entries.find(GROUP, trainer) is not None


def offline_run(trainer: str) -> OfflineRun:
    """Return what the core needs of the offline trainer with this name."""
    target = entries.find(GROUP, trainer)
    assert target is not None
    return entries.load(target)
