"""Trains steps of a run again from its ledger, and compares the parameters after each of them.

The trainer is the run's own class, with links that read the ledger. It publishes nothing. An effect
of the run's asynchrony, interruptions or restarts would therefore change a fingerprint.
"""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from arealite.algo.partition import batch_for_rank
from arealite.api.config import ExperimentConfig
from arealite.api.trainer import trainers
from arealite.api.trainer_messages import Batch, BatchRequest, StepReport, TrainerReady
from arealite.base.errors import ArealiteError, InvariantError
from arealite.impl.trainer.components import Components, load_ppo_engines
from arealite.impl.trainer.world import World
from arealite.system.ledger.ledger import connect, decode_header, read_payloads
from arealite.system.ledger.payloads import find_mismatch

Hook = Callable[[int], None]


class Differs(ArealiteError):
    """The replay of a step differs from the run; the message names the step."""


@dataclass(eq=False)
class LedgerLink:
    """Answers a trainer as TrainerLink does, from the ledger; training ends before step `stop`."""

    ledger: Path
    config: ExperimentConfig
    world: World
    stop: int
    on_step: Hook
    ticket: int = 0

    def __post_init__(self) -> None:
        self._db = connect(self.ledger, read_only=True)

    def start(self, step: int) -> TrainerReady:
        """Ignore the request: a replay rolls nothing back."""
        return TrainerReady(step, 0)

    def next_batch(self, step: int, **_: object) -> tuple[Batch, list[bytes]] | None:
        """Return this rank's shard of the batch that the run trained as `step`."""
        if step >= self.stop:
            return None
        query = "SELECT trained FROM steps WHERE step = ?"
        (trained,) = self._db.execute(query, (step,)).fetchone()
        query = "SELECT header FROM trajectories WHERE trajectory_id = ?"
        found = (self._db.execute(query, (key,)).fetchone() for key in json.loads(trained))
        headers = [decode_header(header) for (header,) in found]
        request = BatchRequest(step, self.world.rank, self.world.size)
        updates = self.config.trainer.ppo.updates
        seed = self.config.seed
        batch = batch_for_rank(request, headers, updates=updates, seed=seed, waits={})
        keys = [headers[index].trajectory_id for index in batch.mine]
        payloads = read_payloads(self.ledger, keys)
        for index, payload in zip(batch.mine, payloads, strict=True):
            if what := find_mismatch(headers[index], payload):
                name = headers[index].trajectory_id
                raise Differs(f"step {step + 1}: payload and header of {name} differ: {what}")
        return batch, payloads

    def report(self, report: object) -> None:
        """Compare a step's mean reward and fingerprint with the run's; ignore other messages.

        Raises:
            Differs: one of them differs.
        """
        if not isinstance(report, StepReport):
            return
        query = "SELECT fingerprint, metrics FROM steps WHERE step = ?"
        fingerprint, metrics = self._db.execute(query, (report.step,)).fetchone()
        reward = report.metrics.get("reward/mean")
        rewards = reward, json.loads(metrics).get("reward/mean", reward)
        fingerprints = report.fingerprint, fingerprint
        for what, (here, there) in ("mean reward is", rewards), ("parameters are", fingerprints):
            if here != there:
                cause = f"step {report.step + 1} is the first that differs"
                raise Differs(f"{cause}: its {what} {here} here, {there} in the run.")
        self.on_step(report.step)

    def close(self) -> None:
        """Close the ledger."""
        self._db.close()


def replay(
    config: ExperimentConfig, ledger: Path, *, scratch: Path, stop: int, leave: bool, on_step: Hook
) -> None:
    """Train the steps before `stop` as this rank of the replay.

    A checkpoint in `scratch` is resumed.

    Args:
        leave: whether to end with a checkpoint in `scratch`.
        on_step: called on rank 0 with each step that is equal.

    Raises:
        Differs: a step is not equal.
    """
    ppo = config.trainer.ppo
    engine = config.trainer.ppo.engine
    with closing(connect(ledger, read_only=True)) as db:
        sql = "SELECT 1 FROM steps WHERE instr(metrics, 'update/padded_tokens')"
        is_old = db.execute(sql).fetchone()
    if is_old and engine.fsdp.layout == "auto":  # AReaLite 0.2 padded rows on a CPU
        ppo = replace(ppo, engine=replace(engine, fsdp=replace(engine.fsdp, layout="padded")))
    checkpoint = replace(ppo.checkpoint, every_steps=0, export=False)
    ppo = replace(ppo, checkpoint=checkpoint, token_stats=False)
    cluster = replace(config.cluster, run_root=str(scratch))
    dataset = config.dataset
    config = replace(config, resume="auto", cluster=cluster, dataset=replace(dataset, eval=None))
    config = replace(config, trainer=replace(config.trainer, ppo=ppo))
    trainer_class: Any = trainers.get(config.trainer.type)

    class Replayer(trainer_class):
        def publish(self, version: int) -> None:
            self.version = version

        def checkpoint(self, step: int) -> None:
            if leave:
                super().checkpoint(step)

    world = World.init(threads=config.launcher.trainer_threads, seed=config.seed)
    link: Any = lambda: LedgerLink(ledger, config, world, stop=stop, on_step=on_step)  # noqa: E731
    trainer = Replayer(config, Components(world, **load_ppo_engines(config), connect=link))
    try:
        trainer.train()
    except (InvariantError, msgspec.MsgspecError) as error:
        raise Differs(f"step {trainer.version + 1} cannot be trained again: {error}") from error
