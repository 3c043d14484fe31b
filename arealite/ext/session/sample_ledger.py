"""The ledger of a session: each sample once, and each step that has trained samples.

It writes the ledger of runs. Each sample is a group of one episode, because a user may train each
alone. Its task has the name of its prompt's group in the session, and `row` is the group's number.

    sample: complete → batched → trained → durable
                     → filtered (stale, dropped, unfinished, rolled back)

A step has the updates between two ends of steps: a `publish`, a `save`, or the end of the session.
Its number is the version of the weights that it trains. If a `save` has ended a step since the last
`publish`, the number is that of the last step plus 1.
"""

import json
import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from threading import RLock
from typing import NamedTuple

import msgspec

from arealite.api.agent import Agent
from arealite.api.engine import Sequence, Stats
from arealite.api.engine_config import OptimizerConfig
from arealite.api.episode import Action
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.logger import loggers
from arealite.api.rollout_messages import Lease
from arealite.api.task import Task
from arealite.api.trainer_messages import StepReport
from arealite.base import config as base_config
from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.session import recorded_updates
from arealite.ext.session.call_loss import Loss
from arealite.ext.session.recorded_updates import RecordedBackward, RecordedUpdate
from arealite.ext.session.sample_rows import Sample, SampleRow
from arealite.impl.engine import checkpoint
from arealite.impl.engine.training_state import EXTRA_FILE
from arealite.impl.rollout.collector import make_trajectory, tree_of
from arealite.system.ledger.group import Group
from arealite.system.ledger.ledger import Ledger

IDENTITY = {"trainer": "session", "group_size": "1"}
"""Names and values of the table `meta` in the ledger of a session."""
GROUP = "group-"
"""Begins the name of a group of samples; its number follows."""
STALE = "stale"
"""Reason of samples that are older than `max_staleness`."""
PUT_UPDATES = "INSERT OR REPLACE INTO session_steps VALUES (?, ?)"
DELETE_UPDATES = "DELETE FROM session_steps WHERE step >= ?"
NEWEST_STEP = "SELECT step, fingerprint FROM steps WHERE step < ? ORDER BY step DESC LIMIT 1"
NO_STEP = 1 << 62
"""Larger than every step."""
CLOSED_SAMPLE = "SELECT state, reason, step FROM groups JOIN trajectories USING (group_id) "
CLOSED_SAMPLE += "WHERE trajectory_id = ?"


class SampleAgent(Agent):
    """Has the record of one answer."""

    async def act(self, observation: object) -> Action:
        """Refuse: a session samples without environments."""
        raise NotImplementedError


class RecordedAnswer(NamedTuple):
    """A sample, and the agent with the record of its request and response."""

    sample: Sample
    agent: Agent


class StatePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that saved weights contain: all before `step` that the ledger has."""

    step: int
    newest_step: int
    """The newest of these steps; -1: none."""
    fingerprint: str
    """The fingerprint of that step. The ledger has another one if it has rolled the step back."""


class SampleLedger:
    """Records samples from the thread of the servers, and steps from the engine's thread."""

    def __init__(self, config: ExperimentConfig) -> None:
        """Open the trial's ledger at its newest saved state, and write the trial's config.

        Later steps are undone: their weights were lost. The samples that are not trained in the
        state are filtered, because the process that had them has ended.

        Raises:
            UserError: The ledger is one of a run, or cannot be written.
        """
        paths = run_paths(config)
        self._ranks = config.launcher.trainer_ranks
        self._lock = RLock()
        """Is held during each change: the queue of the ledger has one user."""
        self._ledger = Ledger(paths.ledger, fingerprint=IDENTITY)
        self._db = self._ledger.connection
        self._db.execute(recorded_updates.TABLE)
        self._open_groups = dict[str, Group]()
        """The samples that no ended step has trained, by trajectory id."""
        self._backwards = list[RecordedBackward]()
        """Calls since the last update."""
        self._gradient_stats = list[Stats]()
        """Stats of these calls."""
        self._updates = list[RecordedUpdate]()
        """Updates of the step that has not ended."""
        self._stats = list[Stats]()
        """Stats of their calls."""
        self._began = time.monotonic()
        self.state, self.start = self._newest_state(paths.checkpoints)
        self._metrics = loggers.get("jsonl")(paths.root)
        self._loaded: StatePosition | None = self.start
        """Position of a loaded state whose later steps are still in the file."""
        self._undo_lost_steps()
        for group in self._open_groups.values():
            reason = "unfinished" if group.step is None else "rolled back"
            self._filter(group, reason)
        if self.state is not None:  # a kill may have come before this note
            self.add_state(self.start, self.state)
        self._ledger.commit()
        self._load()
        _write_config(config, paths, self.start.step)

    def _load(self) -> None:
        """Load the open samples and the counters."""
        groups = self._ledger.open_groups(_group)
        self._open_groups = {
            header.trajectory_id: group for group in groups for header in group.headers
        }
        query = "SELECT COUNT(*), IFNULL(MAX(row) + 1, 0) FROM groups"
        self._num_groups, self.next_group = self._db.execute(query).fetchone()

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Hold the lock; after an error, read the file again, which has none of the writes."""
        with self._lock:
            try:
                yield
            except BaseException:
                self._ledger.take()
                self._load()
                raise

    def close(self) -> None:
        """Filter the samples that were not trained, and close the file."""
        with self._lock, closing(self._metrics), closing(self._ledger):
            for group in self._open_groups.values():
                self._filter(group, "dropped")
            self._ledger.commit()

    def _filter(self, group: Group, reason: str) -> None:
        group.state = "filtered"
        group.reason = reason
        group.step = None
        group.place = None
        self._ledger.put_group(group)

    # ------------------------------------------------------------ samples

    def add_samples(self, answers: Seq[RecordedAnswer]) -> list[Sample]:
        """Store the answers of a call; return the samples with their names in the ledger.

        An answer without a token is not stored.

        Raises:
            InvariantError: The file cannot be written.
        """
        with self._writing():
            samples = [self._add_sample(answer) for answer in answers]
            self._ledger.commit()
        return samples

    def _add_sample(self, answer: RecordedAnswer) -> Sample:
        sample, agent = answer
        if not sample.output_ids:
            return sample
        group = _group(self._num_groups, 0, int(sample.group.removeprefix(GROUP)))
        group.state = "complete"
        lease = Lease(
            lease_id="",
            group_id=group.group_id,
            split="train",
            task=group.task,
            members=[0],
            version=min(sample.versions),
        )
        agent.reward(None)  # the user scores it later, or never
        seconds = agent.record.seconds_generating
        header, payload = make_trajectory(lease, 0, agent, tree_of(agent), seconds=seconds)
        self._num_groups += 1
        self._ledger.put_group(group)
        self._ledger.add_trajectory(header, payload)
        group.finished[0] = [header]
        self._open_groups[header.trajectory_id] = group
        return replace(sample, trajectory_id=header.trajectory_id)

    def filter_stale(self, oldest_version: int) -> None:
        """Filter the samples with older tokens: no later update may train them."""
        with self._writing():
            for trajectory_id, group in [*self._open_groups.items()]:
                if group.start is not None and group.start < oldest_version:
                    del self._open_groups[trajectory_id]
                    self._filter(group, STALE)
            self._ledger.commit()

    # ------------------------------------------------------------ steps

    def record_backward(self, rows: Seq[Sequence], loss: Loss) -> RecordedBackward:
        """Return the record of a call that begins.

        Raises:
            UserError: A row is of no sample that may be trained.
        """
        for index, row in enumerate(rows):
            if problem := self._row_problem(row):
                raise UserError(f"forward_backward: row {index} {problem}")
        sample_rows = [row for row in rows if isinstance(row, SampleRow)]
        return recorded_updates.record_backward(sample_rows, loss)

    def _row_problem(self, row: Sequence) -> str:
        """Return why a row may not be trained; "" if it may."""
        if not isinstance(row, SampleRow) or not row.sample.trajectory_id:
            return (
                "is of no sample in the ledger. Make rows with session.rows or sample.row, "
                "from samples that are drawn without is_trained_on=False."
            )
        sample = row.sample
        if row.tokens.tolist() != [*sample.prompt_ids, *sample.output_ids]:
            return (
                f"has other tokens than its sample {sample.trajectory_id}. "
                "Change its loss_mask or its fields instead."
            )
        return self._closed(sample.trajectory_id)

    def _closed(self, trajectory_id: str) -> str:
        """Return why a sample may not be trained any more; "" if it may."""
        with self._lock:
            if trajectory_id in self._open_groups:
                return ""
            record = self._db.execute(CLOSED_SAMPLE, (trajectory_id,)).fetchone()
        if record is None:
            return f"is of the sample {trajectory_id} of another ledger."
        state, reason, step = record
        if state == "filtered":
            return f"is of the sample {trajectory_id}, which is filtered: {reason}."
        return (
            f"is of the sample {trajectory_id}, which step {step + 1} has trained. "
            "Train a sample several times before the publish or save that ends its step."
        )

    def add_backward(self, backward: RecordedBackward, stats: Stats) -> None:
        """Note a call that has added its gradient."""
        self._backwards.append(backward)
        self._gradient_stats.append(stats)

    def drop_gradient(self) -> None:
        """Drop the calls since the last update."""
        self._backwards = []
        self._gradient_stats = []

    def check_gradient(self) -> None:
        """Check the samples of the next update.

        Raises:
            UserError: Meanwhile a step has ended that has trained one of them, or one became stale.
        """
        for backward in self._backwards:
            for row in backward.rows:
                if problem := self._closed(row.trajectory_id):
                    raise UserError(f"optim_step: the gradient {problem}")

    def add_update(self, lr: float | None, optimizer: OptimizerConfig, stats: Stats) -> None:
        """Note an update, which has applied the gradient."""
        update = RecordedUpdate(
            backwards=self._backwards,
            lr=None if lr is None else float(lr),  # it may be of NumPy
            optimizer=config_tree.plain(optimizer),
        )
        self._updates.append(update)
        self._stats += [*self._gradient_stats, stats]
        self.drop_gradient()

    def end_step(self, version: int, fingerprint: Callable[[], str]) -> None:
        """Write the step of the updates since the last end of a step, if there are any.

        Args:
            version: The version of the weights that it has trained.
            fingerprint: Returns that of the parameters.

        Raises:
            InvariantError: The file cannot be written.
        """
        self._undo_lost_steps()
        if not self._updates:
            return
        parameters = fingerprint()
        rows = {row.trajectory_id: row for update in self._updates for row in update.rows}
        now = time.monotonic()
        metrics = {"time/step_s": now - self._began} | self._update_metrics()
        rewards = [row.reward for row in rows.values() if row.reward is not None]
        if rewards:
            metrics["reward/mean"] = fmean(rewards)
        with self._writing():
            step = self.position(version).step
            for place, trajectory_id in enumerate(rows):
                group = self._open_groups.pop(trajectory_id)
                group.state = "batched"
                group.step = step
                group.place = place
                self._ledger.put_group(group)
            report = StepReport(
                step=step,
                trained=[*rows],
                metrics=metrics,
                fingerprint=parameters,
                ranks=self._ranks,
            )
            self._ledger.train(report)
            updates = recorded_updates.encode_updates(self._updates)
            self._ledger.execute([*self._ledger.take(), (PUT_UPDATES, (step, updates))])
        self._metrics.log(step + 1, metrics)
        self._began = now
        self._forget_updates()

    def _update_metrics(self) -> dict[str, float]:
        """Return the means of the stats of the step's calls."""
        names = dict.fromkeys(name for stats in self._stats for name in stats)
        return {
            f"update/{name}": fmean(stats[name] for stats in self._stats if name in stats)
            for name in names
        }

    def _forget_updates(self) -> None:
        self._updates = []
        self._stats = []

    def add_version(self, version: int, proof: str) -> None:
        """Write a version that the servers have confirmed; see `Ledger.add_version`."""
        with self._lock:
            self._ledger.add_version(version, proof)
            self._ledger.commit()

    # ------------------------------------------------------------ states

    def position(self, version: int) -> StatePosition:
        """Return the position of weights with all steps; `version` is trained next."""
        with self._lock:
            newest_step, fingerprint = self._newest_step(NO_STEP)
        return StatePosition(
            step=max(version, newest_step + 1),
            newest_step=newest_step,
            fingerprint=fingerprint,
        )

    def _newest_step(self, before: int) -> tuple[int, str]:
        """Return the newest step before a number, and its fingerprint; (-1, "") without one."""
        return self._db.execute(NEWEST_STEP, (before,)).fetchone() or (-1, "")

    def add_state(self, position: StatePosition, path: Path) -> None:
        """Note that a folder has the weights of a position: its steps are durable."""
        with self._lock:
            # The opening of a ledger deletes checkpoints of steps that it does not have.
            self._ledger.checkpoint(position.newest_step + 1, str(path))
            self._ledger.commit()

    def check_state(self, path: Path) -> StatePosition:
        """Return the position of a saved state.

        Raises:
            UserError: There is no whole state, or the ledger does not have its steps.
        """
        checkpoint.require(path)
        position = self._position_of(path)
        if position is None:
            raise UserError(
                f"load: the ledger does not have the steps of the state {path}: they were rolled "
                "back, or it was saved elsewhere. Load another state; or pass another trial."
            )
        return position

    def _position_of(self, path: Path) -> StatePosition | None:
        """Return the position of a state, None if the ledger does not have its steps."""
        try:
            extra = json.loads((path / EXTRA_FILE).read_text())["extra"]
            position = msgspec.convert(extra, StatePosition)
        except (OSError, ValueError, KeyError, msgspec.ValidationError):
            return None
        with self._lock:
            newest = self._newest_step(position.step)
        return position if newest == (position.newest_step, position.fingerprint) else None

    def _newest_state(self, folder: Path) -> tuple[Path | None, StatePosition]:
        """Return the newest saved state and its position; (None, the start) without one.

        It is in the trial's folder of checkpoints, or in another folder that the ledger notes.
        """
        noted = {Path(path) for (path,) in self._db.execute("SELECT path FROM checkpoints")}
        paths = checkpoint.list_good(folder)
        for other_folder in {path.parent for path in noted} - {folder}:
            paths += [path for path in checkpoint.list_good(other_folder) if path in noted]
        newest: Path | None = None
        start = StatePosition(step=0, newest_step=-1, fingerprint="")
        for path in paths:
            position = self._position_of(path)
            if position is not None and position.step >= start.step:
                newest = path
                start = position
        return newest, start

    def roll_back(self, position: StatePosition) -> None:
        """Undo the updates after a position; their samples may be trained again."""
        self._forget_updates()
        self.drop_gradient()
        self._loaded = position
        self._undo_lost_steps()

    def _undo_lost_steps(self) -> None:
        """Undo the steps that the loaded state does not have, if that is not done yet."""
        if self._loaded is None:
            return
        step = self._loaded.step
        with self._writing():
            self._ledger.roll_back(step)
            self._ledger.execute([*self._ledger.take(), (DELETE_UPDATES, (step,))])
            self._metrics.rewind(step)
            self._load()
        self._loaded = None


def _group(seq: int, epoch: int, row: int) -> Group:
    """Return the group of a sample; `row` is the number of its group in the session."""
    task = Task(task_id=f"{GROUP}{row}", prompt=None, ground_truth=None, extra_info={})
    return Group(seq=seq, group_id=f"g{seq}", task=task, size=1, epoch=epoch, row=row)


def _write_config(config: ExperimentConfig, paths: RunPaths, first_step: int) -> None:
    """Write the config for report and replay, as that of the steps from `first_step` on."""
    for step, file in paths.starts.items():
        if step > first_step:
            file.unlink()
    paths.configs.mkdir(exist_ok=True)
    base_config.save(config, paths.config, paths.configs / f"{first_step:06d}.yaml")
