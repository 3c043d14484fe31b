"""In every history, store, intake and trainer requests do what the model in model.py expects.

Hypothesis draws the events: leases, results, failures, invalid and repeated messages, turns, lost
workers, batches, roll-backs, and kills of the datapipe between two commits. After each event the
state in memory equals the model. At the end the run continues without faults, and the audit of the
ledger finds no problem.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

from arealite.ext.audit.audit import audit
from arealite.system.ledger.group import FAILURE_WINDOW
from tests.system.datapipe.history_parts import event
from tests.system.datapipe.history_trainer import TrainerEvents
from tests.system.datapipe.model import MAX_ATTEMPTS, MEMBERS, NUM_GROUPS, Model, ModelGroup
from tests.system.scenes import experiment


class Histories(TrainerEvents):
    """All events, kills of the datapipe, and the comparison with the model."""

    @initialize(
        partial_group=st.sampled_from(["retry", "min_size", "drop"]),
        filter_zero_variance=st.booleans(),
        max_staleness=st.integers(0, 2),
    )
    def begin(self, partial_group: str, filter_zero_variance: bool, max_staleness: int) -> None:
        self.model = Model(partial_group, filter_zero_variance, max_staleness)
        self.config = experiment(
            self.folder,
            num_groups=NUM_GROUPS,
            group_size=len(MEMBERS),
            partial_group=partial_group,
            filter_zero_variance=filter_zero_variance,
            max_staleness=max_staleness,
            max_attempts=MAX_ATTEMPTS,
        )
        self.open()
        self.start_trainer(back=0, is_silent=True)
        self.publish(0)

    @event(seconds=st.sampled_from([0.3, 4.0]))
    def wait(self, seconds: float) -> None:
        self.model.now += seconds
        self.serve()

    @event(commits=st.booleans(), times=st.integers(1, 2))
    def kill_datapipe(self, commits: bool, times: int) -> None:
        """Kill the datapipe; the next process has exactly the commits."""
        if commits:
            self.commit()
        for _ in range(times):
            self.ledger.close()
            now = self.model.now
            self.model = pickle.loads(self.committed)
            self.model.now = now
            self.model.restart_datapipe()
            self.open()

    @invariant()
    def store_equals_model(self) -> None:
        model = self.model
        assert self.store.version == model.version
        assert self.store.num_trained_steps() == model.num_trained
        assert self.store.next_step == len(model.batches)
        assert self.store.offered == len(model.groups)
        assert self.store.batches.keys() >= {*range(model.num_trained, len(model.batches))}
        assert self.store.late_results == model.late_results
        assert self.handler.rejections.total() == model.rejections
        assert [*self.store.failed_window] == model.outcomes[-FAILURE_WINDOW:]
        listed = {key: group for key, group in model.groups.items() if group.is_listed}
        assert self.store.groups.keys() == listed.keys()
        for group_id, expected in listed.items():
            self.check_group(self.store.groups[group_id], expected)
        counts = self.store.counts
        reasons = [group.reason for group in model.groups.values()]
        assert counts["filtered"] == sum(map(bool, reasons))
        assert counts["filtered:zero_variance"] == reasons.count("zero_variance")
        assert counts["filtered:unusable:mask"] == reasons.count("unusable")
        assert counts["complete"] == model.count("complete")
        assert counts["leased"] == model.count("leased")
        assert counts["durable"] == model.saved * NUM_GROUPS
        assert counts["trained"] == (model.num_trained - model.saved) * NUM_GROUPS

    def check_group(self, group: Any, expected: ModelGroup) -> None:
        assert (group.state, group.start) == (expected.state, expected.start)
        payloads = [sample.payloads for _, sample in sorted(expected.samples.items())]
        assert [h.trajectory_id for h in group.headers] == [key for ids in payloads for key in ids]
        failures = [(*key, name) for key, name in expected.failures.items()]
        assert sorted(group.failures) == sorted(failures)
        leases = {key: (x.members, x.version) for key, x in group.leases.items()}
        assert leases == {key: (x.members, x.version) for key, x in expected.leases.items()}
        turns = {
            (t.member, t.seat, t.index): t.oldest_version
            for by_member in group.turns.values()
            for t in by_member.values()
        }
        assert turns == {key: oldest for key, (oldest, _) in expected.turns.items()}
        for lease_id, worker in expected.workers.items():
            running = expected.running(lease_id) if lease_id in expected.leases else []
            if running:
                assert self.workers.by_id[worker].leases[lease_id].unfinished >= {*running}
        if group.state == "leased":
            assert group.leasable(MAX_ATTEMPTS, self.model.now) == expected.due(self.model.now)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and hasattr(self, "model"):
                self.end_well()
        finally:
            if hasattr(self, "ledger"):
                self.ledger.close()
            self.patches.close()

    def end_well(self) -> None:
        """Without further faults, the run trains two steps, and the audit finds no problem."""
        self.start_trainer(back=0, is_silent=True)
        num_trained = self.model.num_trained
        self.publish(0)
        # With a gap, complete groups of later planned batches can take all places of new groups.
        num_steps = 0 if self.model.has_gap else 2
        for _ in range(12):
            if self.model.num_trained < num_trained + num_steps:
                self.model.now += 6.0
                self.lease("w0", credit=4, count=4)
                for lease in self.running():
                    self.finish_normally(*lease)
                self.train()
        assert self.model.num_trained >= num_trained + num_steps
        report = audit(self.ledger.path)
        assert report.ok, report.table()


def test_every_history_does_what_the_model_expects() -> None:
    run_state_machine_as_test(Histories, settings=settings(max_examples=40, stateful_step_count=25))
