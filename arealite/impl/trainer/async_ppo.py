"""Asynchronous PPO: the same loop, with publishing and fetching beside training.

A batch is requested one step ahead. Weights are pushed in a thread with its own link.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from arealite.api.config import ExperimentConfig
from arealite.api.publisher import PublishReport
from arealite.api.trainer_messages import Waiting
from arealite.impl.trainer import metrics
from arealite.impl.trainer.components import TrainerComponents
from arealite.impl.trainer.ppo import Answer, PPOTrainer


class AsyncPPOTrainer(PPOTrainer):
    """While a batch is trained, policies up to `max_staleness` versions old generate the next."""

    def __init__(
        self, config: ExperimentConfig, components: TrainerComponents | None = None
    ) -> None:
        super().__init__(config, components)
        self._prefetched: Future[Answer] | None = None
        self._pusher = ThreadPoolExecutor(1, "publish")
        self._push_link = self.components.connect()
        self.links.append(self._push_link)
        self._pushed: Future[PublishReport] | None = None

    def fetch(self, step: int) -> Answer:
        """Wait for the batch that was requested during the last step."""
        answer, self._prefetched = self._prefetched or self.request(step), None
        return self.wait_on_all_ranks(answer)

    def prefetch(self, step: int) -> None:
        """Request the batch after the one that every rank can train."""
        if step < self.ppo.total_steps:
            self._prefetched = self.request(step)

    def publish(self, version: int) -> None:
        """Stage the weights; push them and tell the datapipe beside training, one at a time."""
        with self.clock("wait/publish_s"):
            self.join_publish()
        self.version = version
        with self.clock("time/stage_s"):
            self.stage(version)
        if self.world.is_rank0:
            self._pushed = self._pusher.submit(self.push, self._push_link, version)

    def join_publish(self) -> None:
        """Wait for the publish under way; raise its failure."""
        if self._pushed is not None:
            self.metrics |= metrics.publish_metrics(self._pushed.result())
            self._pushed = None

    @property
    def needs_republish(self) -> bool:
        """Return False while a publish is under way: it may bring what servers lack."""
        return (self._pushed is None or self._pushed.done()) and super().needs_republish

    def while_waiting(self, waiting: Waiting) -> bool:
        """Raise the failure of a publish: without new weights no batch may come."""
        pushed = self._pushed  # the loop may clear it meanwhile
        if pushed is not None and pushed.done():
            pushed.result()
        return super().while_waiting(waiting)

    def close(self) -> None:
        """Close the publisher, which ends a push under way; then the push's thread and link."""
        super().close()
        self._pusher.shutdown()
        self._push_link.close()
