"""Evaluations on held-out tasks, which the datapipe runs beside training."""

from collections.abc import Callable
from dataclasses import dataclass

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.trainer_messages import Waiting
from arealite.base import log
from arealite.impl.trainer.metrics import Metrics, in_group
from arealite.system.links.trainer_link import TrainerLink

logger = log.get(__name__)


@dataclass(kw_only=True)
class Evaluations:
    """Starts the evaluations of a run, one at a time, and logs their results."""

    config: ExperimentConfig
    link: TrainerLink
    write_metrics: Callable[[int, Metrics], None]
    on_wait: Callable[[Waiting], bool]
    """Called once a second during a wait; returns whether to stop waiting."""
    is_enabled: bool
    """False on ranks other than 0 and without held-out tasks: every method is then a no-op."""
    running: int | None = None
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
        ppo = self.config.trainer.ppo
        interval_steps = ppo.eval.every_steps
        if not interval_steps or step % interval_steps or step >= ppo.total_steps:
            return
        if self.running is None:
            self._start(step)
        else:
            logger.warning("evaluation left out", step=step, running=self.running)

    def _start(self, step: int) -> None:
        if self.is_enabled:
            self.link.evaluate(step)
            self.running = step

    def _collect(self, *, wait: bool) -> None:
        """Log the result of the evaluation under way as a line of the step it belongs to."""
        if self.running is None:
            return
        result = self.link.eval_result(wait=wait, on_wait=self.on_wait)
        if result is None:
            return
        self.running = None
        metrics = in_group("eval", result.metrics)
        logger.info("evaluated", step=result.eval_id, **metrics)
        self.write_metrics(result.eval_id, metrics)
