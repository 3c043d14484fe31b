"""Training on rows that exist: the loop that sft, dpo and reward share.

Which rows a step sees is a pure function of the step, so the step is all that a checkpoint has to
know of the data, and a resumed run is the run that was not interrupted, bit for bit on a CPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from arealite.algo.partition import balance
from arealite.api.agent import load_tokenizer
from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.engine import Head, LossFn, LossInput, Sequence, Training
from arealite.api.trainer import Trainer
from arealite.base import log
from arealite.base.errors import UserError
from arealite.impl.engine import checkpoint
from arealite.impl.trainer.metrics import ENGINE, Stopwatch
from arealite.impl.trainer.parts import (
    Parts,
    StopRequest,
    assemble,
    find_checkpoint,
    let_go_of,
    make_engine,
)
from arealite.system.data.chats import Example, Row, identity_of_rows, make_encoder, read_dataset
from arealite.system.data.dataset import permutation

logger = log.get(__name__)

Unit = list[Sequence]
"""Rows that stand together: one, or a preferred one and another."""


@dataclass
class Rows:
    """What an update, or an evaluation, needs of this rank."""

    rows: list[Sequence]
    all_lengths: list[list[int]]
    examples: int
    """Rows (pairs) of all ranks with something to learn."""


class OfflineTrainer(Trainer):
    """One rank of a supervised run; subclasses make rows and a loss of examples."""

    head: Head = "lm"
    together = 1
    stats: tuple[str, ...]
    """What the loss tells of a batch: means over its tokens or pairs."""

    def __init__(self, config: ExperimentConfig, parts: Parts | None = None) -> None:
        self.config, self.offline = config, config.trainer.offline
        self.stop = StopRequest()
        self.train_rows, self.held_out_rows = read_dataset(config)
        self.total_steps = count_steps(config, len(self.train_rows))
        self.parts = parts or assemble(config, self.load_engines)
        self.world, self.engine = self.parts.world, self.parts.engine
        self.encode = make_encoder(config, load_tokenizer(config.model.path))
        self.identity = identity_of_rows(config, self.train_rows)
        self.loss_fn = self.make_loss()
        self.clock = Stopwatch()
        self.saved_step: int | None = None
        self.maker = ThreadPoolExecutor(1, "rows")
        """The one thread that tokenises: a batch ahead of the update."""
        self.ahead: dict[int, Future[Rows]] = {}

    def load_engines(self, config: ExperimentConfig) -> dict[str, Any]:
        """Load the models, as Parts name them."""
        training = Training(self.offline.optimizer, self.offline.lr, self.total_steps)
        return {"engine": make_engine(config, training=training, head=self.head)}

    @abstractmethod
    def make_loss(self) -> LossFn:
        """Return the loss."""

    @abstractmethod
    def make_units(self, examples: list[list[Example]]) -> list[Unit]:
        """Return training rows, weighted as shares of all of them; one without loss is left out."""

    def prepare(self, batch: Rows) -> None:
        """Give this rank's rows what only a model can; nothing here."""

    def train(self) -> None:
        """Train to the last step, or until asked to stop; leave a checkpoint."""
        try:
            step = self.begin()
            while not self.is_over(step):
                batch = self.next_batch(step)
                stats = self.update(batch)
                step += 1
                self.log(step, batch, stats)
                self.keep(step)
            self.end(step)
        finally:
            self.close()

    # ------------------------------------------------------------ the verbs of a step

    def is_over(self, step: int) -> bool:
        """Say whether training ends before `step`, on every rank alike."""
        return step >= self.total_steps or self.world.any(self.stop.asked)

    def next_batch(self, step: int) -> Rows:
        """Wait for batch `step`; the one after it is made meanwhile."""
        for each in range(step, min(step + 2, self.total_steps)):
            if each not in self.ahead:
                self.ahead[each] = self.maker.submit(self.make_batch, each)
        with self.clock("time/rows_s"):
            return self.ahead.pop(step).result()

    def make_batch(self, step: int) -> Rows:
        """Make batch `step`: the next rows of its epoch's seeded order; an epoch's last batch may
        be smaller."""
        train, size = self.train_rows, self.offline.batch_size
        epoch, place = divmod(step, count_batches(len(train), size))
        order: Seq[int] = range(len(train))
        if self.config.dataset.shuffle:
            order = permutation(self.config.seed, epoch, len(train))
        return self.deal([train[i] for i in order[place * size : (place + 1) * size]])

    def deal(self, rows: list[Row]) -> Rows:
        """Encode rows, weigh them as one batch, and give each rank about equal tokens."""
        units = self.make_units([self.encode(row) for row in rows])
        lengths = [[len(row.tokens) for row in unit] for unit in units]
        owners = balance([sum(each) for each in lengths], ranks=self.world.size)
        mine, all_lengths = list[Sequence](), [list[int]() for _ in range(self.world.size)]
        for unit, owner, each in zip(units, owners, lengths, strict=True):
            all_lengths[owner] += each
            mine += unit if owner == self.world.rank else []
        return Rows(mine, all_lengths, len(units))

    def update(self, batch: Rows) -> dict[str, float]:
        """Apply one optimizer update; none where no row has anything to learn."""
        if not batch.examples:
            return {"skipped_update": 1.0}
        with self.clock("time/update_s"):
            self.prepare(batch)
            rows, lengths = batch.rows, batch.all_lengths
            return self.engine.train_batch(rows, lengths, self.loss_fn, together=self.together)

    def keep(self, step: int) -> None:
        """Evaluate and checkpoint where they are due."""
        every = self.offline.checkpoint_every_steps
        if self.is_evaluation_due(step):
            self.evaluate(step)
        if every and step % every == 0:
            self.checkpoint(step)

    def log(self, step: int, batch: Rows, stats: dict[str, float]) -> None:
        """Write the step's line."""
        line = {("update/" if k in ENGINE else "train/") + k: v for k, v in stats.items()}
        line |= self.clock.lap()
        tokens = float(sum(map(sum, batch.all_lengths)))
        line |= {
            "train/examples": float(batch.examples),
            "train/epoch": float(
                (step - 1) // count_batches(len(self.train_rows), self.offline.batch_size)
            ),
            "train/total_steps": float(self.total_steps),
            "throughput/trained_tokens_per_s": tokens / line["time/step_s"],
        }
        for sink in self.parts.loggers:
            sink.log(step, line)
        logger.info("step trained", step=step, loss=stats.get("loss"), seconds=line["time/step_s"])

    # ------------------------------------------------------------ begin and end

    def begin(self) -> int:
        """Resume or start; return the step."""
        step, path = 0, find_checkpoint(self.config)
        if path is not None:
            extra = self.engine.load(path)
            step = self.saved_step = int(extra["step"])
            if (begun := extra.get("identity")) != self.identity:
                raise UserError(
                    f"{path} was begun with {begun}, now it is {self.identity}: put that back, or "
                    "choose another trial_name."
                )
        logger.info("training starts", step=step, of=self.total_steps, checkpoint=str(path))
        for sink in self.parts.loggers:
            sink.rewind(step)
        if self.is_evaluation_due(step):
            self.evaluate(step)
        self.clock.lap()
        return step

    def end(self, step: int) -> None:
        """Leave a checkpoint; after the last step also an evaluation and the exported model."""
        finished = step >= self.total_steps
        if finished and self.held_out_rows:
            self.evaluate(step)
        if self.saved_step != step:
            self.checkpoint(step)
        if finished:
            self.engine.export(run_paths(self.config).export)
        logger.info("training ends", step=step, finished=finished)

    def checkpoint(self, step: int) -> None:
        """Write a checkpoint of the steps below `step`, and remove old ones."""
        folder = run_paths(self.config).checkpoints
        with self.clock("time/checkpoint_s"):
            extra = {"step": step, "identity": self.identity}
            self.engine.save(folder / f"step-{step:06d}", extra)
            self.saved_step = step
            if self.world.lead:
                checkpoint.prune(folder, self.offline.checkpoint_keep)

    def close(self) -> None:
        """Let go of the thread, files, the process group and signals."""
        sinks = [sink.close for sink in self.parts.loggers]
        let_go_of([self.end_making, *sinks, self.world.leave, self.stop.restore])

    def end_making(self) -> None:
        """End the thread; batches that nobody will see are not made."""
        self.maker.shutdown(cancel_futures=True)

    # ------------------------------------------------------------ held-out rows

    def is_evaluation_due(self, step: int) -> bool:
        """Whether the model before `step` is evaluated; the last one is left to the end."""
        every = self.offline.eval_every_steps
        due = step == 0 or (every > 0 and step % every == 0)
        return bool(self.held_out_rows) and due and step < self.total_steps

    @cached_property
    def held_out(self) -> Rows:
        """The held-out rows as one batch: made once, as neither they nor the reference change."""
        batch = self.maker.submit(self.deal, self.held_out_rows).result()
        self.prepare(batch)
        return batch

    def evaluate(self, step: int) -> None:
        """Write the loss of the held-out rows as a line of its own."""
        with self.clock("time/eval_s"):
            batch = self.held_out
            outputs = self.engine.forward(batch.rows, batch.all_lengths)
            stats = self.loss_fn(flatten(batch.rows, outputs))[1] if batch.rows else {}
            sums = self.world.sum({name: float(stats.get(name, 0.0)) for name in self.stats})
        named = {f"eval/{name}": value for name, value in sums.items()}
        logger.info("evaluated", step=step, **named)
        for sink in self.parts.loggers:
            sink.log(step, named)


def count_batches(rows: int, batch_size: int) -> int:
    """Return how many batches an epoch has."""
    return -(-rows // batch_size)


def count_steps(config: ExperimentConfig, rows: int) -> int:
    """Return the steps of a run over `rows` rows."""
    offline = config.trainer.offline
    steps = offline.epochs * count_batches(rows, offline.batch_size)
    return min(steps, offline.max_steps or steps)


def flatten(rows: Seq[Sequence], outputs: dict[str, list[np.ndarray]]) -> LossInput:
    """Lay rows and their outputs out as a loss function sees one micro-batch."""
    masks = [row.loss_mask for row in rows]

    def flat(arrays: Seq[np.ndarray]) -> torch.Tensor:
        parts = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        return torch.from_numpy(np.concatenate(parts).astype(np.float32))

    counts = torch.tensor([int(mask.sum()) for mask in masks])
    return LossInput(
        {name: flat(arrays) for name, arrays in outputs.items()},
        torch.repeat_interleave(torch.arange(len(rows)), counts),
        {name: flat([row.fields[name] for row in rows]) for name in rows[0].fields},
    )
