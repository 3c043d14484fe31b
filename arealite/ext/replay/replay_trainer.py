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
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.payloads import Payload
from arealite.api.trainer import trainers
from arealite.api.trainer_messages import Batch, BatchRequest, StepReport, TrainerReady
from arealite.api.trajectory import TrajectoryHeader
from arealite.base.errors import ArealiteError, InvariantError
from arealite.impl.trainer.base import Components, load_ppo_engines
from arealite.impl.trainer.rank_group import World
from arealite.system.ledger.ledger import connect, decode_header, read_payloads
from arealite.system.ledger.payload_checks import find_mismatch

Hook = Callable[[int], None]


class Differs(ArealiteError):
    """The replay of a step differs from the run; the message names the step."""


@dataclass(eq=False, kw_only=True)
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
        return TrainerReady(step=step, rolled_back_groups=0)

    def next_batch(self, step: int, **_: object) -> tuple[Batch, list[Payload]] | None:
        """Return this rank's shard of the batch that the run trained as `step`."""
        if step >= self.stop:
            return None
        headers = self._trained_headers(step)
        batch = batch_for_rank(
            BatchRequest(step=step, rank=self.world.rank, world_size=self.world.size),
            headers,
            updates=self.config.trainer.ppo.updates,
            seed=self.config.seed,
            waits={},
        )
        local_headers = [headers[index] for index in batch.mine]
        payloads = read_payloads(self.ledger, [header.trajectory_id for header in local_headers])
        for header, payload in zip(local_headers, payloads, strict=True):
            mismatch = find_mismatch(header, payload)
            if mismatch:
                raise Differs(
                    f"step {step + 1}: payload and header of {header.trajectory_id} differ: "
                    f"{mismatch}"
                )
        return batch, payloads

    def _trained_headers(self, step: int) -> list[TrajectoryHeader]:
        """Return the headers of the trajectories that the run trained as `step`."""
        query = "SELECT trained FROM steps WHERE step = ?"
        (trained,) = self._db.execute(query, (step,)).fetchone()
        query = "SELECT header FROM trajectories WHERE trajectory_id = ?"
        headers = list[TrajectoryHeader]()
        for trajectory_id in json.loads(trained):
            (header,) = self._db.execute(query, (trajectory_id,)).fetchone()
            headers.append(decode_header(header))
        return headers

    def report(self, report: object) -> None:
        """Compare a step's mean reward and fingerprint with the run's; ignore other messages.

        Raises:
            Differs: one of them differs.
        """
        if not isinstance(report, StepReport):
            return
        query = "SELECT fingerprint, metrics FROM steps WHERE step = ?"
        fingerprint, metrics = self._db.execute(query, (report.step,)).fetchone()
        problem = f"step {report.step + 1} is the first that differs"
        reward = report.metrics.get("reward/mean")
        reward_of_run = json.loads(metrics).get("reward/mean", reward)
        if reward != reward_of_run:
            raise Differs(
                f"{problem}: its mean reward is {reward} here, {reward_of_run} in the run."
            )
        if report.fingerprint != fingerprint:
            raise Differs(
                f"{problem}: its parameters are {report.fingerprint} here, "
                f"{fingerprint} in the run."
            )
        self.on_step(report.step)

    def close(self) -> None:
        """Close the ledger."""
        self._db.close()


def replay(
    config: ExperimentConfig,
    ledger: Path,
    *,
    scratch: Path,
    stop: int,
    leave: bool,
    on_step: Hook,
) -> None:
    """Train the steps before `stop` as this rank of the replay.

    A checkpoint in `scratch` is resumed.

    Args:
        leave: whether to end with a checkpoint in `scratch`.
        on_step: called on rank 0 with each step that is equal.

    Raises:
        Differs: a step is not equal.
    """
    config = _replay_config(config, ledger, scratch)
    trainer_class: Any = trainers.get(config.trainer.type)

    class Replayer(trainer_class):
        def publish(self, version: int) -> None:
            self.version = version

        def checkpoint(self, step: int) -> None:
            if leave:
                super().checkpoint(step)

    world = World.init(threads=config.launcher.trainer_threads, seed=config.seed)

    def connect_ledger() -> Any:
        return LedgerLink(ledger=ledger, config=config, world=world, stop=stop, on_step=on_step)

    components = Components(world=world, **load_ppo_engines(config), connect=connect_ledger)
    trainer = Replayer(config, components)
    try:
        trainer.train()
    except (InvariantError, msgspec.MsgspecError) as error:
        raise Differs(f"step {trainer.version + 1} cannot be trained again: {error}") from error


def _replay_config(config: ExperimentConfig, ledger: Path, scratch: Path) -> ExperimentConfig:
    """Return the config of a replay in the folder `scratch`: no evaluation, no export."""
    ppo = config.trainer.ppo
    fsdp = ppo.engine.fsdp
    if fsdp.layout == "auto" and _padded_rows(ledger):
        engine = replace(ppo.engine, fsdp=replace(fsdp, layout="padded"))
        ppo = replace(ppo, engine=engine)
    checkpoint = replace(ppo.checkpoint, every_steps=0, export=False)
    ppo = replace(ppo, checkpoint=checkpoint, token_stats=False)
    return replace(
        config,
        resume="auto",
        cluster=replace(config.cluster, run_root=str(scratch)),
        dataset=replace(config.dataset, eval=None),
        trainer=replace(config.trainer, ppo=ppo),
    )


def _padded_rows(ledger: Path) -> bool:
    """Return whether AReaLite 0.2, which padded rows on a CPU, has trained steps of the run."""
    query = "SELECT 1 FROM steps WHERE instr(metrics, 'update/padded_tokens')"
    with closing(connect(ledger, read_only=True)) as db:
        return db.execute(query).fetchone() is not None
