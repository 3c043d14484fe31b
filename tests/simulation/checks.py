"""Checks the invariants of a seed against messages and files seen from outside the package."""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

from arealite.api.rollout_messages import Ack, Episode, Result
from arealite.api.trainer_messages import Batch
from arealite.api.turns import digest
from arealite.ext.audit.audit import audit
from arealite.system.ledger.ledger import connect
from arealite.system.links import wire
from tests.simulation.network import SimSocket
from tests.simulation.scenario import level_of

if TYPE_CHECKING:
    from arealite.system.datapipe.datapipe import Datapipe
    from tests.simulation.simulation import Simulation

MAX_KEPT = 400
"""Length from which a queue of episodes or statements counts as unbounded."""
SIGN_OF_LIFE = wire.encode(Ack(digest=b""))


class Checks:
    """The guarantees given so far, and the checks that they hold."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.checked = 0
        self.first: str | None = None
        self.results: dict[bytes, list[Episode]] = {}
        """Episodes that workers sent, by the digest of their message."""
        self.acknowledged: dict[str, Episode] = {}
        """By trajectory id: acknowledged episodes."""
        self.late_results: set[tuple[str, int]] = set()
        """(lease id, member) of results that arrived too late to be stored."""
        self.promised: dict[str, set[int]] = {"step": set(), "checkpoint": set()}
        """Steps and checkpoints that were acknowledged to the trainer."""
        self.batches: dict[int, tuple[str, ...]] = {}
        """By step: trajectory ids of every batch that a rank received."""

    def expect(self, holds: bool, what: str, *, throw: bool = True) -> None:
        """Count a check; end the seed if it fails."""
        self.checked += 1
        if holds:
            return
        self.first = self.first or what
        self.sim.note("VIOLATION", what)
        self.sim.failed.set()
        if throw:
            from tests.simulation.simulation import Violation

            raise Violation(what)

    # ------------------------------------------------------------ observations during the run

    def sees(self, socket: SimSocket, frames: list[bytes]) -> None:
        """Record sent results and acknowledgements."""
        name = socket.process.name
        if name.startswith("trainer"):
            return
        if name.startswith("rollout") and b"Result" in frames[0][:16]:
            result = wire.decode_to_datapipe(frames[0])
            assert isinstance(result, Result)
            self.results[digest(frames[0])] = result.episodes
        elif name == "datapipe" and b"Ack" in frames[1][:12] and frames[1] != SIGN_OF_LIFE:
            ack = wire.decode_to_worker(frames[1])
            assert isinstance(ack, Ack)
            for episode in self.results.get(ack.digest, []):
                for header in episode.headers:
                    self.acknowledged[header.trajectory_id] = episode
        if name.startswith("rollout"):
            link = self.sim.worker_links[name]
            self.expect(len(link.unacknowledged) <= MAX_KEPT, f"{link.worker_id} keeps too much")

    def promise(self, kind: str, step: int) -> None:
        """Record an acknowledged step or checkpoint."""
        self.promised[kind].add(step)

    def trainer_starts(self, step: int) -> None:
        """Drop the guarantees that a roll-back of the trainer ends."""
        self.promised["step"] = {s for s in self.promised["step"] if s < step}
        self.promised["checkpoint"] = {s for s in self.promised["checkpoint"] if s <= step}

    def check_views(self, views: list[Batch]) -> None:
        """Check that all ranks and requests get the same batch."""
        first = views[0]
        ids = tuple(h.trajectory_id for h in first.headers)
        for view in views:
            same = (view.headers, view.ranks, view.minibatches)
            agree = same == (first.headers, first.ranks, first.minibatches)
            self.expect(agree, f"ranks see different batches {first.step}")
        self.expect(len(set(ids)) == len(ids), f"batch {first.step} has a trajectory twice")
        before = self.batches.setdefault(first.step, ids)
        self.expect(before == ids, f"batch {first.step} was {before}, now it is {ids}")

    def check_trained_once(self, batch: Batch) -> None:
        """Check that the model has not trained any trajectory of the batch before."""
        model = [t for step in self.sim.launch.trainer.model for t in step]  # type: ignore[union-attr]
        twice = [t for t, n in Counter(model).items() if n > 1]
        self.expect(not twice, f"step {batch.step}: {twice[:3]} trained twice")

    # ------------------------------------------------------------ the file

    def opened(self, pipe: Datapipe) -> None:
        """Observe decisions of a new datapipe that are not in the file."""
        store, is_too_late = pipe.machine.store, pipe.machine.store._is_too_late

        def watched(group: Any, episode: Episode) -> bool:
            late = is_too_late(group, episode)
            if late:
                self.late_results.add((episode.lease_id, episode.member))
            return late

        store._is_too_late = watched  # type: ignore[method-assign]

    def after_crash(self) -> None:
        """Check the file after a kill against the guarantees."""
        from tests.simulation.simulation import ledger_of

        path = ledger_of(self.sim)
        with closing(sqlite3.connect(path)) as db:  # as a restart would: with recovery
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'groups'").fetchone():
                self.expect(not self.acknowledged, "the ledger is empty after acknowledgements")
                return
            self._check_acknowledged(db)
            for kind, table in (("step", "steps"), ("checkpoint", "checkpoints")):
                held = {row[0] for row in db.execute(f"SELECT step FROM {table}")}
                lost = sorted(self.promised[kind] - held)
                self.expect(not lost, f"{kind}s {lost} were said to be durable and are lost")
        self._audit(path)

    def _audit(self, path: Any) -> None:
        report = audit(path)
        self.expect(report.ok, f"the audit: {report.lost} {report.repeated} {report.groups}")
        age, eta = report.max_staleness, self.sim.loosest_eta
        self.expect(age <= eta, f"the audit: age {age} trained, η is {eta}")
        if self.sim.scenario.policy == "wait":
            stale = {r for r in report.filtered_by_reason if r == "stale"}
            self.expect(not stale or self.sim.changed, "wait discards")

    def _check_acknowledged(self, db: sqlite3.Connection) -> None:
        kept = {row[0] for row in db.execute("SELECT trajectory_id FROM trajectories")}
        for name in [n for n in self.acknowledged if n not in kept]:
            episode = self.acknowledged[name]
            if name.startswith("e") or (episode.lease_id, episode.member) in self.late_results:
                continue
            row = db.execute("SELECT state FROM groups WHERE group_id = ?", (episode.group_id,))
            (state,) = row.fetchone() or (None,)
            gone = state == "filtered" or self._failed_for_good(db, episode)
            self.expect(gone, f"{name} was acknowledged, and a restart does not find it ({state})")

    def _failed_for_good(self, db: sqlite3.Connection, episode: Episode) -> bool:
        """Return whether the member had failed for good before this result arrived."""
        sql = "SELECT COUNT(*) FROM failures WHERE group_id = ? AND member = ?"
        (failures,) = db.execute(sql, (episode.group_id, episode.member)).fetchone()
        return failures >= self.sim.scenario.max_attempts or (
            failures > 0 and self.sim.scenario.partial_group == "drop"
        )

    # ------------------------------------------------------------ the end

    def final(self) -> None:
        """Check the ledger of the finished run against the trained model."""
        from tests.simulation.simulation import ledger_of

        sim, path = self.sim, ledger_of(self.sim)
        step, model = sim.disk.newest()
        self.expect(step == sim.scenario.total_steps == len(model), f"it ended at step {step}")
        with closing(connect(path, read_only=True)) as db:
            self._check_acknowledged(db)
            said = dict(db.execute("SELECT step, trained FROM steps").fetchall())
            for number, ids in enumerate(model):
                same = sorted(json.loads(said.get(number, "[]"))) == sorted(ids)
                self.expect(same, f"step {number}: model and ledger differ")
            self._check_groups(db, model)
            self._check_order(db)
            most = "SELECT MAX(n) FROM (SELECT COUNT(*) n FROM failures GROUP BY group_id, member)"
            (attempts,) = db.execute(most).fetchone()
            allowed = sim.scenario.max_attempts
            self.expect((attempts or 0) <= allowed, f"an episode was tried {attempts} times")
        self._audit(path)
        for link in sim.worker_links.values():
            name = link.worker_id
            if name in sim.roles:
                self.expect(not link.unacknowledged, f"{name} holds results at the end")

    def _check_groups(self, db: sqlite3.Connection, model: list[tuple[str, ...]]) -> None:
        """Check that each trained group is complete and was trained in one step."""
        where = {t.rsplit("/", 2)[0]: step for step, ids in enumerate(model) for t in ids}
        eaten = Counter(t for ids in model for t in ids)
        self.expect(max(eaten.values(), default=1) == 1, "trained twice")
        rows = db.execute("SELECT group_id, step FROM groups WHERE state IN ('trained','durable')")
        self.expect(dict(rows.fetchall()) == where, "trained groups are not the model's")
        for group, step in where.items():
            sql = "SELECT trajectory_id FROM trajectories WHERE group_id = ?"
            whole = {row[0] for row in db.execute(sql, (group,))}
            self.expect(whole <= set(model[step]), f"{group} was trained in parts")

    def _check_order(self, db: sqlite3.Connection) -> None:
        """Check that the groups follow the order of the dataset without gaps or repeats."""
        scenario = self.sim.scenario
        rows = db.execute("SELECT seq, row, epoch FROM groups ORDER BY seq").fetchall()
        seen = Counter[int | None]()
        for place, (seq, row, epoch) in enumerate(rows):
            own = level_of(row) if scenario.curriculum else None
            among = [r for r in range(scenario.rows) if own in (None, level_of(r))]
            due_epoch, at = divmod(seen[own], len(among))
            seen[own] += 1
            order = list(range(len(among)))
            random.Random(f"{scenario.seed}/{due_epoch}").shuffle(order)
            due = (place, among[order[at] if scenario.shuffle else at], due_epoch)
            self.expect((seq, row, epoch) == due, f"group {place} is row {row} of epoch {epoch}")
