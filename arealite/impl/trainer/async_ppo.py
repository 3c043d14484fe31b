"""Asynchronous PPO: the same loop; publishing and fetching happen beside training.

Only the lines that are asynchronous are here: a batch is asked for a step ahead, and weights are
pushed in a thread with its own link to the datapipe.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from arealite.api.config import ExperimentConfig
from arealite.api.publisher import PublishReport
from arealite.api.trainer_messages import Waiting
from arealite.impl.trainer import metrics
from arealite.impl.trainer.parts import Parts
from arealite.impl.trainer.ppo import Answer, PPOTrainer


class AsyncPPOTrainer(PPOTrainer):
    """While a batch is trained, policies up to `max_staleness` versions old generate the next."""

    def __init__(self, config: ExperimentConfig, parts: Parts | None = None) -> None:
        super().__init__(config, parts)
        self._fetched: Future[Answer] | None = None
        self._pusher = ThreadPoolExecutor(1, "publish")
        self._push_link = self.parts.connect()
        self.links.append(self._push_link)
        self._pushed: Future[PublishReport] | None = None

    def fetch(self, step: int) -> Answer:
        """Take the batch asked for during the last step."""
        asked, self._fetched = self._fetched or self.ask(step), None
        return self.together(asked)

    def ask_ahead(self, step: int) -> None:
        """Ask for the batch after the one that every rank can train."""
        if step < self.ppo.total_steps:
            self._fetched = self.ask(step)

    def publish(self, version: int) -> None:
        """Stage the weights; push and tell the datapipe beside training, one at a time."""
        with self.clock("wait/publish_s"):
            self.settle()
        self.version = version
        with self.clock("time/stage_s"):
            self.stage(version)
        if self.world.lead:
            self._pushed = self._pusher.submit(self.push, self._push_link, version)

    def settle(self) -> None:
        """Wait for the publish under way; its failure is raised here."""
        if self._pushed is not None:
            self.line |= metrics.publish_metrics(self._pushed.result())
            self._pushed = None

    @property
    def needs_republish(self) -> bool:
        """Not while a publish is under way: what servers lack, they may be getting."""
        return (self._pushed is None or self._pushed.done()) and super().needs_republish

    def while_waiting(self, waiting: Waiting) -> bool:
        """A failed publish ends the wait too: without new weights no batch may come."""
        pushed = self._pushed  # the loop may settle it meanwhile
        if pushed is not None and pushed.done():
            pushed.result()
        return super().while_waiting(waiting)

    def held(self) -> list[Callable[[], None]]:
        """A push under way ends with the publisher's loop."""
        return [*super().held(), self._pusher.shutdown, self._push_link.close]
