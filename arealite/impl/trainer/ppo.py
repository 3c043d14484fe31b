"""Synchronous PPO: the loop, one verb a line.

Here the algorithm can be read; what each verb needs (rows, metrics, ranks, weights) is in the
modules beside.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from arealite.algo.losses import make_policy_loss, value_loss
from arealite.api import trainer_messages as messages
from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.publisher import PublishReport
from arealite.api.trainer import Trainer
from arealite.api.trainer_messages import Batch, StepReport, Waiting
from arealite.base import log
from arealite.base.errors import InvariantError, RoleError
from arealite.impl.trainer import metrics
from arealite.impl.trainer.batch import Minibatch, TrainBatch, make_rows
from arealite.impl.trainer.estimate import critic_rows, estimate, take_values
from arealite.impl.trainer.parts import (
    Parts,
    StopRequest,
    assemble,
    critic_of,
    find_checkpoint,
    let_go_of,
    make_engines,
    prune,
)
from arealite.system.ledger import token_stats
from arealite.system.links.trainer_link import TrainerLink

logger = log.get(__name__)

ATTEMPTS = 10
"""Compositions of a batch that may contain unusable groups, before the run stops."""
SLICE_S = 1.0
"""How long ranks wait apart before they look together whether a server needs weights."""
NOTED = {"logprobs": "prox_logprobs", "entropy": "entropy"}
"""What of the policy's outputs, as it is before the first update, becomes which field of rows."""
Answer = tuple[Batch, list[bytes]] | None
T = TypeVar("T")


class PPOTrainer(Trainer):
    """One rank. Version k is the policy before batch k is trained; version k + 1 comes out."""

    def __init__(self, config: ExperimentConfig, parts: Parts | None = None) -> None:
        self.config, self.ppo = config, config.trainer.ppo
        self.stop = StopRequest()
        self.parts = parts or assemble(config, make_engines)
        self.world, self.engine = self.parts.world, self.parts.engine
        self.reference, self.critic = self.parts.reference, self.parts.critic
        self.link, self.fetch_link = self.parts.connect(), self.parts.connect()
        self.links = [self.link, self.fetch_link]
        self.fetcher = ThreadPoolExecutor(1, "fetch")
        self.version = -1
        """That every server should hold."""
        self.closing = False
        self.loss_fn = make_policy_loss(self.ppo.loss, self.ppo.kl)
        self.value_loss_fn = value_loss(self.ppo.critic)
        self.clock = metrics.Stopwatch()
        self.notes_tokens = self.ppo.token_stats
        self.line: dict[str, float] = {}
        """Metrics of the step under way."""
        self.interruptions = 0
        self.generated: float | None = None
        """Tokens that workers have generated, as of the last line; None before the first."""
        self.saved_step: int | None = None
        self.evaluating: int | None = None

    def train(self) -> None:
        """Train until `total_steps`, or until asked to stop; leave a checkpoint."""
        try:
            step = self.begin()
            while (batch := self.next_batch(step)) is not None:
                self.forward(batch)
                minibatches = self.estimate(batch)
                stats = [self.update(each) for _ in range(self.ppo.epochs) for each in minibatches]
                self.report(batch, stats)
                step += 1
                self.publish(step)
                self.log(step)
                self.keep(step)
            self.end(step)
        finally:
            self.close()

    # ------------------------------------------------------------ the verbs of a step

    def next_batch(self, step: int) -> TrainBatch | None:
        """Wait for batch `step`; None on every rank when training ends here."""
        stopping = self.world.any(self.stop.asked)
        if step >= self.ppo.total_steps or stopping:
            logger.info("no further batch", step=step, stopping=stopping)
            return None
        for _ in range(ATTEMPTS):
            with self.clock("wait/batch_s"):
                answer = self.fetch(step)
                # Some ranks may have got a batch while others were told that training ends.
                everyone = self.world.all(answer is not None)
            if answer is None or not everyone:
                return None
            with self.clock("time/rows_s"):
                if batch := make_rows(*answer, self.ppo, world=self.world, link=self.link):
                    self.ask_ahead(step + 1)
                    return batch
        raise InvariantError(f"batch {step} could not be trained {ATTEMPTS} times, see the logs")

    def ask_ahead(self, step: int) -> None:
        """Ask for the next batch before this one is trained. No-op in synchronous training."""

    def fetch(self, step: int) -> Answer:
        """Ask the datapipe for batch `step`."""
        return self.together(self.ask(step))

    def ask(self, step: int) -> Future[Answer]:
        """Ask for batch `step` in a thread with a link of its own."""
        return self.fetcher.submit(self.fetch_link.next_batch, step, on_wait=self.while_waiting)

    def together(self, asked: Future[T]) -> T:
        """Wait until every rank has its answer; servers without the newest weights get them."""
        waiting = True
        while waiting:
            if wait([asked], SLICE_S).done:
                asked.result()  # a failure is raised now: the other ranks may wait for ever
            flags = {"waiting": float(not asked.done()), "stale": float(self.needs_republish)}
            flags = self.world.max(flags)
            waiting = flags["waiting"] > 0.0
            if flags["stale"] > 0.0:
                self.republish()
        return asked.result()

    def forward(self, batch: TrainBatch) -> None:
        """Compute logprobs, entropy and values of the rows with the parameters before the update.

        A batch with one update has no pass of the policy here: that of the update computes the
        same. The publisher first pauses a generator that shares the parameters, until `publish`.
        """
        if self.parts.publisher is not None:
            with self.clock("wait/hold_s"):
                self.parts.publisher.pause_generation()
        rows, lengths = batch.rows, batch.all_lengths
        with self.clock("time/forward_s"):
            if not self.ppo.is_single_pass:
                outputs = self.engine.forward(rows, lengths)
                for name, field in NOTED.items():
                    batch.fill(field, outputs[name])
            if self.reference is not None:
                batch.fill("ref_logprobs", self.reference.forward(rows, lengths)["logprobs"])
            if self.critic is not None:
                take_values(batch, self.critic.forward(*critic_rows(batch))["values"])

    def estimate(self, batch: TrainBatch) -> list[Minibatch]:
        """Turn rewards into advantages, and the batch into what each update trains."""
        with self.clock("time/estimate_s"):
            return estimate(batch, self.ppo, self.world)

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """Apply one optimizer update; none where no rank has a row with a gradient."""
        rows, lengths = minibatch.rows, minibatch.all_lengths
        if not any(lengths):
            return {"skipped_update": 1.0}
        with self.clock("time/update_s"):
            noting = NOTED if self.ppo.is_single_pass else None
            stats = self.engine.train_batch(rows, lengths, self.loss_fn, noting=noting)
            if self.critic is not None:
                of_critic = self.critic.train_batch(rows, lengths, self.value_loss_fn)
                stats |= {f"critic/{name}": value for name, value in of_critic.items()}
            return stats

    def report(self, batch: TrainBatch, stats: list[dict[str, float]]) -> None:
        """Describe the step, and tell the datapipe that the batch is trained."""
        with self.clock("time/report_s"):
            sums, maxima = metrics.token_sums(batch)
            sums, maxima = self.world.sum(sums), self.world.max(maxima)
            self.note_tokens(batch)
            learners = [self.engine, *([self.critic] if self.critic else [])]
            fingerprint = "".join(engine.fingerprint() for engine in learners)
            if not self.world.lead:
                return
            self.interruptions += sum(h.interruptions for h in batch.headers)
            self.line |= {
                **metrics.trajectory_metrics(batch.headers, step=batch.step),
                **metrics.token_metrics(sums, maxima),
                **metrics.update_metrics(stats),
                **{k if "/" in k else f"datapipe/{k}": v for k, v in batch.plan.waits.items()},
                "rollout/interrupted_generations": float(self.interruptions),
                "throughput/trained_tokens": float(sum(h.trained_tokens for h in batch.headers)),
            }
            trained = [header.trajectory_id for header in batch.headers]
            ranks, line = self.world.size, dict(self.line)
            self.link.tell(StepReport(batch.step, trained, line, ranks, fingerprint))

    def publish(self, version: int) -> None:
        """Bring every server to `version`."""
        self.version = version
        with self.clock("time/publish_s"):
            self.stage(version)
            if self.world.lead:
                self.line |= metrics.publish_metrics(self.push(self.link, version))

    def stage(self, version: int) -> None:
        """Stream the weights to the publisher, anew as often as it asks; all ranks take part."""
        again = True
        while again:
            again = self.world.any(self._stream(version))

    def republish(self) -> None:
        """Publish the version again to servers that can get it only from this trainer."""
        self.stage(self.version)
        if self.parts.publisher is not None:
            self.parts.publisher.push(self.version)

    @property
    def needs_republish(self) -> bool:
        """Whether this rank's publisher asks for `republish`."""
        return self.parts.publisher is not None and self.parts.publisher.needs_republish

    def push(self, link: TrainerLink, version: int) -> PublishReport:
        """Bring the staged weights to the servers; tell the datapipe over this thread's `link`."""
        assert self.parts.publisher is not None, "only rank 0 publishes"
        report = self.parts.publisher.push(version)
        link.tell(messages.Published(version))
        return report

    def _stream(self, version: int) -> bool:
        publisher = self.parts.publisher
        on_device = publisher is not None and publisher.wants_device
        weights = self.engine.stream_weights(on_device=on_device)
        if publisher is not None:
            return publisher.stage(version, weights)
        list(weights)  # takes part in gathering; nothing comes out
        return False

    def keep(self, step: int) -> None:
        """Checkpoint and evaluate where they are due; neither holds generation."""
        if self.ppo.checkpoint.every_steps and step % self.ppo.checkpoint.every_steps == 0:
            self.checkpoint(step)
        self.collect_evaluation(wait=False)
        if self.is_evaluation_due(step):
            if self.evaluating is None:
                self.evaluate(step)
            else:
                logger.warning("evaluation left out", step=step, running=self.evaluating)

    # ------------------------------------------------------------ begin and end

    def begin(self) -> int:
        """Resume or start, bring the servers to the first version, evaluate; return the step."""
        step, path = 0, find_checkpoint(self.config)
        if path is not None:
            if self.critic is not None:
                self.critic.load(critic_of(self.config, path))
            extra = self.engine.load(path)
            step, self.interruptions = int(extra["step"]), int(extra["interruptions"])
            self.saved_step = step
        logger.info("training starts", step=step, checkpoint=str(path or "none"))
        if self.world.lead:
            self.link.start(step)
            for sink in self.parts.loggers:
                sink.rewind(step)
        ticket = int(self.world.max({"ticket": float(self.link.ticket)})["ticket"])
        for link in self.links:
            link.ticket = ticket
        self.publish(step)
        self.settle()
        if self.has_evaluation and step == 0:
            self.evaluate(step)
            self.collect_evaluation(wait=True)
        elif self.is_evaluation_due(step):  # begun before the end of the last process, or done
            self.evaluate(step)
        self.clock.lap()
        self.line.clear()
        return step

    def end(self, step: int) -> None:
        """Leave a checkpoint; after the last step also the exported model and an evaluation."""
        finished = step >= self.ppo.total_steps
        self.settle()
        if self.saved_step != step:
            self.checkpoint(step)
        if finished and self.ppo.checkpoint.export:
            self.engine.export(run_paths(self.config).export)
        if finished and self.has_evaluation and not self.stop.asked:
            self.collect_evaluation(wait=True)
            self.evaluate(step)
            self.collect_evaluation(wait=True)
        if self.world.lead:
            reason = "all steps are trained" if finished else "asked to stop"
            self.link.tell(messages.Finish(reason))
        logger.info("training ends", step=step, finished=finished)

    def settle(self) -> None:
        """Wait for what runs beside the loop; nothing does here."""

    def close(self) -> None:
        """Let go of everything."""
        let_go_of(self.held())

    def held(self) -> list[Callable[[], None]]:
        """List what lets go of threads, links, files, the process group and signals, in order."""
        publisher = [self.parts.publisher.close] if self.parts.publisher else []
        sinks = [sink.close for sink in self.parts.loggers]
        links = [self.end_fetch, self.fetch_link.close, self.link.close]
        return [*links, *publisher, *sinks, self.world.leave, self.stop.restore]

    def end_fetch(self) -> None:
        """End the fetch under way; it notices within a second."""
        self.closing = True
        self.fetcher.shutdown()

    # ------------------------------------------------------------ smaller verbs

    @property
    def has_evaluation(self) -> bool:
        """Whether this rank asks for evaluations."""
        return self.world.lead and self.config.evaluates

    def is_evaluation_due(self, step: int) -> bool:
        """Whether an evaluation begins before batch `step`; the last one is left to the end."""
        every, last = self.ppo.eval.every_steps, self.ppo.total_steps
        return self.has_evaluation and every > 0 and step % every == 0 and step < last

    def checkpoint(self, step: int) -> None:
        """Write a checkpoint of the steps below `step`, tell the datapipe, and remove old ones."""
        paths, name = run_paths(self.config), f"step-{step:06d}"
        with self.clock("time/checkpoint_s"):
            if self.critic is not None:  # first: a checkpoint is one from the policy's rename on
                self.critic.save(paths.critic / name, {"step": step})
            path = paths.checkpoints / name
            self.engine.save(path, {"step": step, "interruptions": self.interruptions})
            self.saved_step = step
            if self.world.lead:
                self.link.tell(messages.Checkpointed(step, str(path)))
                prune(paths, self.ppo.checkpoint.keep)

    def note_tokens(self, batch: TrainBatch) -> None:
        """Keep what reports show of tokens; a disk that fails ends that, and never the run."""
        if self.notes_tokens:
            try:
                stats, folder = metrics.token_stats(batch), run_paths(self.config).token_stats
                token_stats.write(folder, batch.step, self.world.rank, stats)
            except OSError as error:
                self.notes_tokens = False
                logger.warning("token stats end", step=batch.step, error=str(error))

    def evaluate(self, step: int) -> None:
        """Ask for an evaluation; one runs at a time."""
        self.link.evaluate(step)
        self.evaluating = step

    def collect_evaluation(self, *, wait: bool) -> None:
        """Write the evaluation under way, if it is there, as a line of the step it was asked at."""
        if self.evaluating is None:
            return
        if (result := self.link.eval_result(wait=wait, on_wait=self.while_evaluating)) is None:
            return
        self.evaluating = None
        named = {k if "/" in k else f"eval/{k}": v for k, v in result.metrics.items()}
        logger.info("evaluated", step=result.eval_id, **named)
        for sink in self.parts.loggers:
            sink.log(result.eval_id, named)

    def log(self, step: int) -> None:
        """Write the step's line; its seconds reach from the line before to this one."""
        times = self.clock.lap()
        if not self.world.lead:
            return
        line = self.line | times
        line |= metrics.throughput(line, before=self.generated)
        self.generated = line.get("rollout/tokens", self.generated)
        with self.clock("time/log_s"):
            for sink in self.parts.loggers:
                sink.log(step, line)
        seconds = times["time/step_s"]
        logger.info("step trained", step=step, reward=line["reward/mean"], seconds=seconds)
        self.line.clear()

    def while_waiting(self, waiting: Waiting) -> bool:
        """Called once a second during a wait: say whether to stop instead of waiting on."""
        if self.closing:
            raise RoleError("training ended while a batch was waited for")
        logger.debug("waiting", request=waiting.request, detail=waiting.detail)
        return self.stop.asked

    def while_evaluating(self, waiting: Waiting) -> bool:
        """As while_waiting; alone, this rank can also republish. Other ranks are elsewhere."""
        if self.world.size == 1 and self.needs_republish:
            self.republish()
        return self.while_waiting(waiting)
