"""Evaluations on held-out tasks, which the datapipe runs beside training."""

from __future__ import annotations

from collections.abc import Callable

from arealite.api.config import ExperimentConfig
from arealite.api.trainer_messages import Waiting
from arealite.base import log
from arealite.system.links.trainer_link import TrainerLink

logger = log.get(__name__)


class Evaluations:
    """Starts the evaluations of a run, one at a time, and logs their results."""

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        link: TrainerLink,
        is_rank0: bool,
        write_metrics: Callable[[int, dict[str, float]], None],
        on_wait: Callable[[Waiting], bool],
    ) -> None:
        """Every method is a no-op on ranks other than 0, and in runs without held-out tasks.

        Args:
            on_wait: called once a second during a wait; returns whether to stop waiting.
        """
        self.is_enabled = is_rank0 and config.evaluates
        self.every_steps = config.trainer.ppo.eval.every_steps
        self.total_steps = config.trainer.ppo.total_steps
        self._link, self._write_metrics, self._on_wait = link, write_metrics, on_wait
        self._running: int | None = None
        """Step of the evaluation under way."""

    def run(self, step: int) -> None:
        """Evaluate the policy before batch `step`, and wait for the result."""
        self._collect(wait=True)
        self._start(step)
        self._collect(wait=True)

    def start_if_due(self, step: int) -> None:
        """Log a result that has arrived; start an evaluation at the interval of the config.

        The evaluation of the last step is left to `run`.
        """
        self._collect(wait=False)
        every, is_last = self.every_steps, step >= self.total_steps
        if not self.is_enabled or not every or step % every or is_last:
            return
        if self._running is None:
            self._start(step)
        else:
            logger.warning("evaluation left out", step=step, running=self._running)

    def _start(self, step: int) -> None:
        if self.is_enabled:
            self._link.evaluate(step)
            self._running = step

    def _collect(self, *, wait: bool) -> None:
        """Log the result of the evaluation under way as a line of the step it belongs to."""
        if self._running is None:
            return
        if (result := self._link.eval_result(wait=wait, on_wait=self._on_wait)) is None:
            return
        self._running = None
        metrics = {k if "/" in k else f"eval/{k}": v for k, v in result.metrics.items()}
        logger.info("evaluated", step=result.eval_id, **metrics)
        self._write_metrics(result.eval_id, metrics)
