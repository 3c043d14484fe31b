"""Asynchronous PPO: the same loop; publishing and fetching happen beside training.

Only the lines that are asynchronous are here: two threads, each with its own link to the datapipe.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from arealite.api.config import ExperimentConfig
from arealite.api.publisher import PublishReport
from arealite.api.trainer_messages import Batch, Waiting
from arealite.base.errors import RoleError
from arealite.impl.trainer import metrics
from arealite.impl.trainer.parts import Parts
from arealite.impl.trainer.ppo import PPOTrainer


class AsyncPPOTrainer(PPOTrainer):
    """While a batch is trained, policies up to `max_staleness` versions old generate the next."""

    is_synchronous = False

    def __init__(self, config: ExperimentConfig, parts: Parts | None = None) -> None:
        super().__init__(config, parts)
        self._fetcher = ThreadPoolExecutor(1, "fetch")
        self._fetch_link = self.parts.connect()
        self._fetched: Future[Any] | None = None
        self._pusher = ThreadPoolExecutor(1, "publish")
        self._push_link = self.parts.connect()
        self._pushed: Future[PublishReport] | None = None
        self._closing = False

    def fetch(self, step: int) -> tuple[Batch, list[bytes]] | None:
        """Take the batch asked for during the last step, and ask for the one after."""
        answer = (self._fetched or self._ask(step)).result()
        follows = answer is not None and step + 1 < self.ppo.total_steps
        self._fetched = self._ask(step + 1) if follows else None
        return answer

    def publish(self, version: int) -> None:
        """Stage the weights; push and tell the datapipe beside training, one at a time."""
        with self.clock("wait/publish_s"):
            self.settle()
        with self.clock("time/stage_s"):
            self.stage(version)
        if self.world.lead:
            self._pushed = self._pusher.submit(self.push, self._push_link, version)

    def settle(self) -> None:
        """Wait for the publish under way; its failure is raised here."""
        if self._pushed is not None:
            self.line |= metrics.publish_metrics(self._pushed.result())
            self._pushed = None

    def while_waiting(self, waiting: Waiting) -> bool:
        """A failed publish ends the wait too: without new weights no batch may come."""
        pushed = self._pushed  # the loop may settle it meanwhile
        if pushed is not None and pushed.done():
            pushed.result()
        if self._closing:
            raise RoleError("training ended while a batch was waited for")
        return super().while_waiting(waiting)

    def held(self) -> list[Callable[[], None]]:
        """The fetch under way first (it notices within a second), a push when its loop ends."""
        links = [self._fetch_link.close, self._push_link.close]
        return [self._end_fetch, *super().held(), self._pusher.shutdown, *links]

    def _end_fetch(self) -> None:
        self._closing = True
        self._fetcher.shutdown()

    def _ask(self, step: int) -> Future[Any]:
        return self._fetcher.submit(self._fetch_link.next_batch, step, on_wait=self.while_waiting)
