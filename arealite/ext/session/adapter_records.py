"""The record that a session has of each adapter."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from arealite.api.engine_config import OptimizerConfig


@dataclass(eq=False, kw_only=True)
class AdapterRecord:
    """The versions of one adapter, or of the default weights."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Options of its optimizer, if it is trained."""
    is_trained: bool = True
    """Whether this session trains it; False: servers have it from a folder (`Session.serve`)."""
    version: int = 0
    """That of the newest `publish`."""
    confirmed: int = 0
    """Oldest version that may sample: all servers in traffic hold it, or the first version."""
    saved_steps: int = 0
    """Number of steps of a ledger that a `save` has ended since the newest `publish`."""
    is_updated: bool = False
    """Whether there was an update since the newest `publish`, or since such a `save`."""

    @property
    def step(self) -> int:
        """The number of the step that the next update belongs to: the version that it trains."""
        return self.version + self.saved_steps

    def end_step(self) -> None:
        """Note a `save` in a session with a ledger, in which an update ends."""
        self.saved_steps += self.is_updated
        self.is_updated = False

    def next_version(self) -> None:
        """Begin the next version: its number is above those of all steps before it."""
        self.end_step()
        self.version += max(1, self.saved_steps)
        self.saved_steps = 0

    def confirm(self, version: int) -> None:
        """Note a version that the servers hold."""
        self.confirmed = version


def forget_if_failed(records: dict[str, AdapterRecord], name: str, added: Future[Any]) -> None:
    """Make the name of an adapter free again if it cannot be added."""
    record = records[name]

    def forget(added: Future[Any]) -> None:
        is_failed = added.cancelled() or added.exception() is not None
        if is_failed and records.get(name) is record:
            del records[name]

    added.add_done_callback(forget)
