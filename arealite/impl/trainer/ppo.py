"""PPO: the training loop, its steps in the order they are called, and the asynchronous variant.

The modules beside this one hold rows (`batch`), advantages (`batch_advantages`), metrics, and the
base class of all trainers (`base`).
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from arealite.algo.losses import make_policy_loss, make_value_loss
from arealite.api import trainer_messages as messages
from arealite.api.engine import Stats
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import StepMetricsMaker
from arealite.api.payloads import Payload
from arealite.api.publisher import PublishReport
from arealite.api.trainer_messages import Batch, StepReport, Waiting
from arealite.base import entries, log
from arealite.base.errors import InvariantError, RoleError
from arealite.impl.trainer import metrics
from arealite.impl.trainer.base import (
    BaseTrainer,
    Components,
    load_ppo_engines,
    stage_weights,
)
from arealite.impl.trainer.batch import Minibatch, TrainBatch, make_rows
from arealite.impl.trainer.batch_advantages import compute_advantages
from arealite.impl.trainer.evaluation import Evaluations
from arealite.impl.trainer.metrics import Metrics
from arealite.system.links.trainer_link import TrainerLink

logger = log.get(__name__)

ATTEMPTS = 10
"""Attempts to get a batch without unusable groups before the run stops."""
SLICE_S = 1.0
"""Seconds between two checks by all waiting ranks whether a server needs weights."""
RECORDED = {"logprobs": "prox_logprobs", "entropy": "entropy"}
"""Outputs of the policy before the first update: {output: field of the rows}."""
FetchedBatch = tuple[Batch, list[Payload]] | None
T = TypeVar("T")


class PPOTrainer(BaseTrainer):
    """One rank of the trainer. Batch k is trained on policy version k and makes version k + 1."""

    def __init__(self, config: ExperimentConfig, components: Components | None = None) -> None:
        super().__init__(config, components, load_ppo_engines)
        self.ppo = config.trainer.ppo
        self.checkpoint_keep = self.ppo.checkpoint.keep
        self.publisher = self.components.publisher
        self.reference = self.components.reference
        self.critic = self.components.critic
        self.engine.replays_routing = self.ppo.collector.routing == "replay"
        self.loss_fn = make_policy_loss(self.ppo.loss, self.ppo.kl)
        for change in entries.results(entries.hooks("loss_change"), self.ppo):
            self.loss_fn = change(self.loss_fn)
        self.value_loss_fn = make_value_loss(self.ppo.critic)
        self.links: list[TrainerLink] = []
        self.link = self.open_link()
        self.fetch_link = self.open_link()
        self.fetcher = ThreadPoolExecutor(1, "fetch")
        self.close_at_end(self.end_fetch)
        self.is_closing = False
        self.evaluations = Evaluations(
            config=config,
            link=self.link,
            write_metrics=self.write_metrics,
            on_wait=self.while_evaluating,
            is_enabled=self.world.is_rank0 and config.evaluates,
        )
        self.version = -1
        """Version that every server should hold."""
        makers: list[StepMetricsMaker] = entries.hooks("step_metrics")
        self.step_metrics = entries.results(makers, config, self.world)
        """Measure a trained batch."""
        self.metrics: Metrics = {}
        """Metrics of the current step."""
        self.interruptions = 0
        self.generated_tokens: float | None = None
        """Tokens that workers had generated at the previous step; None before the first."""

    def train(self) -> None:
        """Train until `total_steps` or a stop request; write a checkpoint at the end."""
        try:
            step = self.begin()
            while (batch := self.next_batch(step)) is not None:
                self.forward(batch)
                minibatches = self.compute_advantages(batch)
                stats = [
                    self.update(minibatch)
                    for _ in range(self.ppo.epochs)
                    for minibatch in minibatches
                ]
                self.report(batch, stats)
                step += 1
                self.publish(step)
                self.log(step)
                self.checkpoint_and_eval(step)
            self.end(step)
        finally:
            self.close()

    def begin(self) -> int:
        """Resume or start, publish the first version, and evaluate; return the step."""
        step, progress = self.load_checkpoint()
        self.interruptions = int(progress.get("interruptions", 0))
        if self.world.is_rank0:
            self.link.start(step)
            self.rewind_metrics(step)
        newest = self.world.max({"ticket": float(self.link.ticket)})
        for link in self.links:
            link.ticket = int(newest["ticket"])
        self.publish_first(step)
        if step == 0:
            self.evaluations.run(step)
        else:  # the evaluation of an earlier process may be unfinished
            self.evaluations.start_if_due(step)
        self.clock.lap()
        self.metrics.clear()
        return step

    # ------------------------------------------------------------ a step

    def next_batch(self, step: int) -> TrainBatch | None:
        """Wait for batch `step`; None on every rank when training ends here."""
        stopping = self.world.any(self.stop.requested)
        if step >= self.ppo.total_steps or stopping:
            logger.info("no further batch", step=step, stopping=stopping)
            return None
        for _ in range(ATTEMPTS):
            with self.clock("wait/batch_s"):
                answer = self.fetch(step)
                # A stop request may reach some ranks before their batch and others after it.
                all_have_one = self.world.all(answer is not None)
            if answer is None or not all_have_one:
                return None
            plan, payloads = answer
            with self.clock("time/rows_s"):
                batch = make_rows(
                    plan,
                    payloads,
                    self.ppo,
                    world=self.world,
                    link=self.link,
                )
                if batch is not None:
                    self.prefetch(step + 1)
                    return batch
        raise InvariantError(f"batch {step} could not be trained {ATTEMPTS} times, see the logs")

    def forward(self, batch: TrainBatch) -> None:
        """Compute logprobs, entropy and values of the rows under the parameters before the update.

        With one update per batch the policy's pass is skipped: the update records the same outputs.
        A generator that shares the parameters is paused until `publish`.
        """
        if self.publisher is not None:
            with self.clock("wait/pause_s"):
                self.publisher.pause_generation()
        rows = batch.rows
        with self.clock("time/forward_s"):
            if not self.ppo.is_single_pass:
                outputs = self.engine.forward(rows)
                for name, field in RECORDED.items():
                    batch.fill(field, outputs[name])
                if self.ppo.loss.centering and rows:
                    batch.fill("prox_top_logprobs", outputs["top_logprobs"])
            if self.reference is not None:
                outputs = self.reference.forward(rows)
                batch.fill("ref_logprobs", outputs["logprobs"])
            if self.critic is not None:
                outputs = self.critic.forward(batch.critic_rows())
                batch.store_values(outputs["values"])

    def compute_advantages(self, batch: TrainBatch) -> list[Minibatch]:
        """Set the advantages of the rows; return the minibatch of each update."""
        with self.clock("time/advantages_s"):
            return compute_advantages(batch, self.ppo, self.world)

    def update(self, minibatch: Minibatch) -> Stats:
        """Apply one optimizer update; skip it if no rank has a row with a gradient."""
        rows = minibatch.rows
        if not minibatch.num_rows:
            return {"skipped_update": 1.0}
        with self.clock("time/update_s"):
            record_outputs = RECORDED if self.ppo.is_single_pass else None
            stats = self.engine.train_batch(
                rows,
                self.loss_fn,
                record_outputs=record_outputs,
            )
            if self.critic is not None:
                critic_stats = self.critic.train_batch(rows, self.value_loss_fn)
                stats |= {f"critic/{name}": total for name, total in critic_stats.items()}
            return stats

    def report(self, batch: TrainBatch, stats: list[Stats]) -> None:
        """Compute the step's metrics, and report to the datapipe that the batch is trained."""
        with self.clock("time/report_s"):
            for measure in self.step_metrics:
                self.metrics |= measure(batch, stats)
            engines = self.engines.values()
            fingerprints = [engine.fingerprint() for engine in engines]
            if not self.world.is_rank0:
                return
            headers = batch.headers
            self.interruptions += sum(header.interruptions for header in headers)
            trained_tokens = sum(header.trained_tokens for header in headers)
            self.metrics |= {
                **metrics.in_group("datapipe", batch.plan.waits),
                "rollout/interrupted_generations": float(self.interruptions),
                "throughput/trained_tokens": float(trained_tokens),
            }
            step_report = StepReport(
                step=batch.step,
                trained=[header.trajectory_id for header in headers],
                metrics=dict(self.metrics),
                ranks=self.world.size,
                fingerprint="".join(fingerprints),
            )
            self.link.report(step_report)

    def publish(self, version: int) -> None:
        """Update every server to `version`."""
        self.version = version
        with self.clock("time/publish_s"):
            self.stage(version)
            if self.world.is_rank0:
                report = self.push(self.link, version)
                self.metrics |= metrics.publish_metrics(report)

    def publish_first(self, version: int) -> None:
        """Publish `version` and check the run; then the datapipe may lease episodes."""
        self.version = version
        self.republish()
        for check in self.components.after_first_publish:
            check(self.config, self.engine, self.world, version)
        if self.world.is_rank0:
            self.report_published(self.link, version)

    def log(self, step: int) -> None:
        """Write the step's metrics; `time/step_s` is the time since the previous call."""
        times = self.clock.lap()
        if not self.world.is_rank0:
            return
        line = self.metrics | times
        line |= metrics.throughput(line, before=self.generated_tokens)
        self.generated_tokens = line.get("rollout/tokens", self.generated_tokens)
        with self.clock("time/log_s"):
            self.write_metrics(step, line)
        logger.info(
            "step trained",
            step=step,
            reward=line.get("reward/mean"),
            seconds=times["time/step_s"],
        )
        self.metrics.clear()

    def checkpoint_and_eval(self, step: int) -> None:
        """Write a checkpoint and start an evaluation when they are due; generation continues."""
        interval_steps = self.ppo.checkpoint.every_steps
        if interval_steps and step % interval_steps == 0:
            self.checkpoint(step)
        self.evaluations.start_if_due(step)

    def end(self, step: int) -> None:
        """Write a checkpoint; after the last step also export the model and evaluate."""
        finished = step >= self.ppo.total_steps
        self.join_publish()
        if self.saved_step != step:
            self.checkpoint(step)
        if finished and self.ppo.checkpoint.export:
            self.engine.export(self.paths.export)
        if finished and not self.stop.requested:
            self.evaluations.run(step)
        if self.world.is_rank0:
            reason = "all steps are trained" if finished else "asked to stop"
            self.link.report(messages.Finish(reason=reason))
        logger.info("training ends", step=step, finished=finished)

    # ------------------------------------------------------------ batches

    def fetch(self, step: int) -> FetchedBatch:
        """Request batch `step` from the datapipe."""
        return self.wait_on_all_ranks(self.request(step))

    def prefetch(self, step: int) -> None:
        """Request the next batch early; no-op in synchronous training."""

    def request(self, step: int) -> Future[FetchedBatch]:
        """Request batch `step` in a thread that has its own link."""
        return self.fetcher.submit(
            self.fetch_link.next_batch,
            step,
            on_wait=self.while_waiting,
        )

    def wait_on_all_ranks(self, answer: Future[T]) -> T:
        """Wait until every rank has its batch; meanwhile republish to servers that need it."""
        waiting = True
        while waiting:
            if wait([answer], SLICE_S).done:
                answer.result()  # raise a failure now: other ranks would wait forever
            local_flags = {
                "waiting": float(not answer.done()),
                "republish": float(self.needs_republish),
            }
            flags = self.world.max(local_flags)
            waiting = flags["waiting"] > 0.0
            if flags["republish"] > 0.0:
                self.republish()
        return answer.result()

    def while_waiting(self, waiting: Waiting) -> bool:
        """Return whether to stop waiting; called once a second during a wait."""
        if self.is_closing:
            raise RoleError("training ended during the wait for a batch")
        logger.debug("waiting", request=waiting.request, detail=waiting.detail)
        return self.stop.requested

    def while_evaluating(self, waiting: Waiting) -> bool:
        """Return `while_waiting`; with one rank also republish to servers that need it."""
        if self.world.size == 1 and self.needs_republish:
            self.republish()
        return self.while_waiting(waiting)

    def end_fetch(self) -> None:
        """Cancel the running request for a batch; it ends within a second."""
        self.is_closing = True
        self.fetcher.shutdown()

    # ------------------------------------------------------------ weights

    def stage(self, version: int) -> None:
        """Stream the weights to the publisher; see `stage_weights`."""
        proof = self.components.proof
        stage_weights(self.engine, self.publisher, proof, self.world, version)

    def push(self, link: TrainerLink, version: int) -> PublishReport:
        """Send the staged weights to the servers; report it over this thread's `link`."""
        assert self.publisher is not None, "only rank 0 publishes"
        report = self.publisher.push(version)
        self.report_published(link, version)
        return report

    def report_published(self, link: TrainerLink, version: int) -> None:
        """Report that all servers have a version, with the record of its weights."""
        proof = self.components.proof
        record = proof.record(version) if proof is not None else ""
        link.report(messages.Published(version=version, proof=record))

    def join_publish(self) -> None:
        """Wait for a publish that runs in another thread; no-op in synchronous training."""

    @property
    def needs_republish(self) -> bool:
        """Whether this rank's publisher needs the weights again."""
        return self.publisher is not None and self.publisher.needs_republish

    def republish(self) -> None:
        """Send the current version again, to servers that can get it only from the trainer."""
        self.stage(self.version)
        if self.publisher is not None:
            self.publisher.push(self.version)

    # ------------------------------------------------------------ files and links

    @property
    def progress(self) -> dict[str, object]:
        """Return the counters that a checkpoint holds."""
        return {"interruptions": self.interruptions}

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Report the checkpoint to the datapipe."""
        self.link.report(messages.Checkpointed(step=step, path=str(path)))

    def open_link(self) -> TrainerLink:
        """Open a link to the datapipe, for one thread."""
        link = self.components.connect()
        self.links.append(link)
        self.close_at_end(link.close)
        return link


class AsyncPPOTrainer(PPOTrainer):
    """PPO that publishes weights and fetches batches concurrently with training.

    Batches are requested one step ahead. Weights are pushed in a thread with its own link.
    Meanwhile workers generate with weights that are at most `max_staleness` versions old.
    """

    def __init__(self, config: ExperimentConfig, components: Components | None = None) -> None:
        super().__init__(config, components)
        self._prefetched: Future[FetchedBatch] | None = None
        self._pusher = ThreadPoolExecutor(1, "publish")
        self._push_link = self.components.connect()
        self.links.append(self._push_link)
        self._pushed: Future[PublishReport] | None = None

    def fetch(self, step: int) -> FetchedBatch:
        """Wait for the batch that `prefetch` requested during the previous step."""
        answer = self._prefetched or self.request(step)
        self._prefetched = None
        return self.wait_on_all_ranks(answer)

    def prefetch(self, step: int) -> None:
        """Request batch `step` while the batch before it is trained."""
        if step < self.ppo.total_steps:
            self._prefetched = self.request(step)

    def publish(self, version: int) -> None:
        """Stage the weights, then push them in a thread; wait for the previous push first."""
        with self.clock("wait/publish_s"):
            self.join_publish()
        self.version = version
        with self.clock("time/stage_s"):
            self.stage(version)
        if self.world.is_rank0:
            self._pushed = self._pusher.submit(self.push, self._push_link, version)

    def join_publish(self) -> None:
        """Wait for the running push; raise its failure."""
        if self._pushed is not None:
            self.metrics |= metrics.publish_metrics(self._pushed.result())
            self._pushed = None

    @property
    def needs_republish(self) -> bool:
        """Whether servers need the weights again; False during a push, which may update them."""
        is_pushing = self._pushed is not None and not self._pushed.done()
        return not is_pushing and super().needs_republish

    def while_waiting(self, waiting: Waiting) -> bool:
        """Raise the failure of a push: without new weights no batch can be completed."""
        pushed = self._pushed  # the loop may clear it meanwhile
        if pushed is not None and pushed.done():
            pushed.result()
        return super().while_waiting(waiting)

    def close(self) -> None:
        """Close the publisher, which ends a running push; then close its thread and link."""
        super().close()
        self._pusher.shutdown()
        self._push_link.close()
