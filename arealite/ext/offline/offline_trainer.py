"""Offline training: the loop of sft, dpo and reward over the rows of a dataset.

The rows of a step depend on the step only. So a checkpoint needs no other position in the data, and
a resumed run equals an uninterrupted one, bit for bit on a CPU.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from arealite.algo.partition import balance
from arealite.api.agent import load_tokenizer
from arealite.api.engine import LossFn, LossInput, Sequence, Stats, Training
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import PlacedRow
from arealite.base import log
from arealite.base.errors import UserError
from arealite.ext.offline.examples import Example, RowEncoder
from arealite.ext.offline.rows import identity_of_rows, read_dataset
from arealite.impl.engine.micro_batches import collate
from arealite.impl.trainer.base import BaseTrainer, Components, Engines, make_engine
from arealite.impl.trainer.batch import Minibatch
from arealite.impl.trainer.metrics import ENGINE, Metrics
from arealite.system.data.dataset import permutation

logger = log.get(__name__)

CPU = torch.device("cpu")
Unit = list[Sequence]
"""The rows of one example: one, or a preferred and a rejected one."""


class OfflineTrainer(BaseTrainer):
    """One rank of a supervised run; subclasses make the rows and the loss."""

    rows_per_example = 1
    stats: tuple[str, ...]
    """Names of the loss function's stats: means over the tokens or pairs of a batch."""

    def __init__(self, config: ExperimentConfig, components: Components | None = None) -> None:
        self.offline = config.trainer.offline
        self.checkpoint_keep = self.offline.checkpoint_keep
        super().__init__(config, components, self.load_engines)
        tokenizer = load_tokenizer(config.model.path)
        self.encode = RowEncoder(config, tokenizer).encode
        self.identity = identity_of_rows(config, self.train_rows)
        self.loss_fn = self.make_loss()
        self.tokenizing = ThreadPoolExecutor(1, "rows")
        """One thread, which makes the next batch during an update."""
        self.ahead: dict[int, Future[Minibatch]] = {}
        self.close_at_end(partial(self.tokenizing.shutdown, cancel_futures=True))

    def read_data(self) -> None:
        """Read the dataset, on which the number of steps depends."""
        self.train_rows, self.held_out_rows = read_dataset(self.config)
        num_rows = len(self.train_rows)
        self.epoch_steps = math.ceil(num_rows / self.offline.batch_size)
        self.total_steps = self.offline.total_steps(num_rows)

    def load_engines(self, config: ExperimentConfig) -> Engines:
        """Load the model that is trained."""
        training = Training(
            optimizer=self.offline.optimizer,
            lr=self.offline.lr,
            total_updates=self.total_steps,
        )
        engine = make_engine(config, training=training, head=self.head)
        return Engines(engine=engine)

    @abstractmethod
    def make_loss(self) -> LossFn:
        """Return the loss."""

    @abstractmethod
    def make_units(self, examples: list[list[Example]]) -> list[Unit]:
        """Make the rows of a batch, skipping examples without loss; loss weights sum to 1."""

    def prepare(self, batch: Minibatch) -> None:
        """Set the fields of this rank's rows that need a model; no-op in the base class."""

    def train(self) -> None:
        """Train to the last step or a stop request; write a checkpoint at the end."""
        try:
            step = self.begin()
            while not self.is_over(step):
                batch = self.next_batch(step)
                stats = self.update(batch)
                step += 1
                self.log(step, batch, stats)
                self.checkpoint_and_eval(step)
            self.end(step)
        finally:
            self.close()

    # ------------------------------------------------------------ a step

    def is_over(self, step: int) -> bool:
        """Return whether training ends before `step`; the same on every rank."""
        return step >= self.total_steps or self.world.any(self.stop.requested)

    def next_batch(self, step: int) -> Minibatch:
        """Return batch `step`, and start to make the one after it."""
        end = min(step + 2, self.total_steps)
        for batch_step in range(step, end):
            if batch_step not in self.ahead:
                self.ahead[batch_step] = self.tokenizing.submit(self.make_batch, batch_step)
        with self.clock("time/rows_s"):
            return self.ahead.pop(step).result()

    def make_batch(self, step: int) -> Minibatch:
        """Make batch `step`: the next rows in the seeded order of its epoch.

        The last batch of an epoch may be smaller.
        """
        num_rows = len(self.train_rows)
        epoch, step_in_epoch = divmod(step, self.epoch_steps)
        order: Seq[int] = range(num_rows)
        if self.config.dataset.shuffle:
            order = permutation(self.config.seed, epoch, num_rows)
        begin = step_in_epoch * self.offline.batch_size
        end = begin + self.offline.batch_size
        rows = [self.train_rows[index] for index in order[begin:end]]
        return self.deal(rows)

    def deal(self, rows: list[PlacedRow]) -> Minibatch:
        """Encode and weight the rows of one batch; every rank gets about the same tokens."""
        examples = [self.encode(row) for row in rows]
        units = self.make_units(examples)
        num_tokens = [sum(len(row.tokens) for row in unit) for unit in units]
        owners = balance(num_tokens, ranks=self.world.size)
        local_rows = [
            row
            for unit, owner in zip(units, owners, strict=True)
            if owner == self.world.rank
            for row in unit
        ]
        return Minibatch(
            rows=local_rows,
            num_rows=sum(map(len, units)),
            num_tokens=sum(num_tokens),
        )

    def update(self, batch: Minibatch) -> Stats:
        """Apply one optimizer update; skip it if no row has a loss."""
        if not batch.num_rows:
            return {"skipped_update": 1.0}
        with self.clock("time/update_s"):
            self.prepare(batch)
            return self.engine.train_batch(
                batch.rows,
                self.loss_fn,
                rows_per_example=self.rows_per_example,
            )

    def checkpoint_and_eval(self, step: int) -> None:
        """Evaluate and checkpoint where they are due."""
        if self.is_evaluation_due(step):
            self.evaluate(step)
        interval_steps = self.offline.checkpoint_every_steps
        if interval_steps and step % interval_steps == 0:
            self.checkpoint(step)

    def log(self, step: int, batch: Minibatch, stats: Stats) -> None:
        """Write the step's metrics."""
        metrics = Metrics()
        for name, mean in stats.items():
            group = "update" if name in ENGINE else "train"
            metrics[f"{group}/{name}"] = mean
        times = self.clock.lap()
        seconds = times["time/step_s"]
        metrics |= {
            **times,
            "train/examples": float(batch.num_rows // self.rows_per_example),
            "train/epoch": float((step - 1) // self.epoch_steps),
            "train/total_steps": float(self.total_steps),
            "throughput/trained_tokens_per_s": batch.num_tokens / seconds,
        }
        self.write_metrics(step, metrics)
        loss = stats.get("loss")
        logger.info("step trained", step=step, loss=loss, seconds=seconds)

    # ------------------------------------------------------------ begin and end

    def begin(self) -> int:
        """Resume or start; return the step."""
        step, progress = self.load_checkpoint()
        earlier_identity = progress.get("identity")
        if progress and earlier_identity != self.identity:
            raise UserError(
                f"{self.paths.checkpoints} was started with {earlier_identity}, "
                f"now it is {self.identity}: restore that, or choose another trial_name."
            )
        self.rewind_metrics(step)
        if self.is_evaluation_due(step):
            self.evaluate(step)
        self.clock.lap()
        return step

    def end(self, step: int) -> None:
        """Write a checkpoint; after the last step also evaluate and export the model."""
        finished = step >= self.total_steps
        if finished and self.held_out_rows:
            self.evaluate(step)
        if self.saved_step != step:
            self.checkpoint(step)
        if finished:
            self.engine.export(self.paths.export)
        logger.info("training ends", step=step, finished=finished)

    @property
    def progress(self) -> dict[str, object]:
        """The settings that must not change within a trial."""
        return {"identity": self.identity}

    # ------------------------------------------------------------ held-out rows

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether the model before `step` is evaluated; the last one is left to `end`."""
        if not self.held_out_rows or step >= self.total_steps:
            return False
        interval_steps = self.offline.eval_every_steps
        return step == 0 or (interval_steps > 0 and step % interval_steps == 0)

    @cached_property
    def held_out(self) -> Minibatch:
        """The held-out rows as one batch, made once: neither they nor the reference change."""
        dealing = self.tokenizing.submit(self.deal, self.held_out_rows)
        batch = dealing.result()
        self.prepare(batch)
        return batch

    def evaluate(self, step: int) -> None:
        """Write the loss of the held-out rows, in a line of its own."""
        with self.clock("time/eval_s"):
            batch = self.held_out
            outputs = self.engine.forward(batch.rows)
            stats = {}
            if batch.rows:
                loss_input = as_loss_input(batch.rows, outputs)
                _, stats = self.loss_fn(loss_input)
            local_stats = {name: float(stats.get(name, 0.0)) for name in self.stats}
            means = self.world.sum(local_stats)
        num_examples = batch.num_rows // self.rows_per_example
        metrics = {"eval/examples": float(num_examples)}
        if batch.num_rows:
            metrics |= {f"eval/{name}": mean for name, mean in means.items()}
        logger.info("evaluated", step=step, **metrics)
        self.write_metrics(step, metrics)


def as_loss_input(
    rows: Seq[Sequence],
    outputs: dict[str, list[np.ndarray]],
) -> LossInput:
    """Return rows and their outputs of `TrainEngine.forward` as input of a loss function."""
    rows_with_outputs = list[Sequence]()
    for row, *arrays in zip(rows, *outputs.values(), strict=True):
        outputs_of_row = dict(zip(outputs, arrays, strict=True))
        fields = row.fields | outputs_of_row
        rows_with_outputs.append(replace(row, fields=fields))
    batch = collate(rows_with_outputs, CPU)
    fields = dict(batch.fields)
    outputs_N = {name: fields.pop(name) for name in outputs}
    return LossInput(outputs=outputs_N, rows_N=batch.rows_N, fields=fields)
