"""The real parts of a datapipe without its sockets, beside the model, for `test_histories`."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from structlog.testing import capture_logs

from arealite.api.experiment_config import run_paths
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.trainer_messages import BatchRequest, Unusable
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe import group_store, idle_time, trainer_request_handler, workers
from arealite.system.datapipe.effects import BeginTraining, Effect, FilterGroups, Outbox, Send
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.message_checks import Intake
from arealite.system.datapipe.trainer_request_handler import TrainerRequestHandler
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger import group as open_group
from arealite.system.ledger.ledger import Ledger, read_payloads
from tests.system.datapipe.model import MAX_ATTEMPTS, MEMBERS
from tests.system.scenes import tasks

CLOCK_USERS = group_store, idle_time, open_group, trainer_request_handler, workers
"""Modules that read the clock."""
TTL_S = 30.0
ROUTE = b"route"
PICK = st.sampled_from([0, 0, 0, 1, 2, 5, 9])
"""Index into a list, from its end: recent entries are more interesting."""


CYCLE = "grant_some", "finish_oldest", "finish_oldest"
STORIES = st.sampled_from(
    [
        (),
        ("grant_some",),
        ("grant_some", "finish_one", "commit"),
        (*CYCLE, "train"),
        (*CYCLE, "finish_one", "train"),
        (*CYCLE, "train", *CYCLE, "train"),
        ("grant_some", "send_turns", "finish_one"),
        ("grant_some", "send_turns", "fail_one"),
        ("grant_some", "send_turns", "lose_one"),
        ("grant_some", "send_old_tokens", "finish_one"),
        ("grant_some", "fail_one", "fail_one", "finish_one", "finish_one"),
        ("grant_some", "lose_one", "lose_one", "finish_one"),
        (*CYCLE, "train", "grant_some", "send_old_tokens"),
        (*CYCLE, "forge_worker", "finish_one"),
        (*CYCLE, *CYCLE, "request_next", "reject_next"),
        (*CYCLE, *CYCLE, "request_next", "reject_next", *CYCLE, "request_next", "reject_again"),
        (*CYCLE, "train", "go_back", "request_next"),
    ]
)
"""Names of the methods by which the run proceeds before an event."""


def event(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Make a rule of a method. The run proceeds before it, because Hypothesis disables rules."""

    def decorate(method: Callable[..., None]) -> Any:
        @wraps(method)
        def proceed_first(
            self: Parts, *values: Any, story: Sequence[str] = (), **named_values: Any
        ) -> None:
            for step in story:
                getattr(self, step)()
            method(self, *values, **named_values)

        return rule(story=STORIES, **strategies)(proceed_first)

    return decorate


class Pending(Outbox):
    """Performs effects: at once, or on demand if they wait for a commit."""

    def __init__(self, ledger: Ledger, sent: list[Any]) -> None:
        super().__init__()
        self.ledger = ledger
        self.sent = sent
        self.handler: TrainerRequestHandler | None = None
        self.waiting: list[Effect] = []

    def send(self, route: bytes, message: Any, payloads: Sequence[bytes] = ()) -> None:
        self.sent.append(message)

    def after_commit(self, effect: Effect | None, *, hurry: bool = False) -> None:
        assert effect
        self.waiting.append(effect)
        if hurry:
            self.commit()

    def commit(self) -> None:
        """Commit the ledger, and perform the effects that waited for it."""
        waiting = self.waiting
        self.waiting = []
        self.ledger.commit()
        assert self.handler
        for effect in waiting:
            match effect:
                case Send():
                    self.send(effect.route, effect.message)
                case BeginTraining():
                    self.handler.begin_training()
                case FilterGroups():
                    self.handler.filter_groups(effect)


class Parts(RuleBasedStateMachine):
    """Store, intake, trainer requests and workers, and the model of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.folder = Path(tempfile.mkdtemp())
        self.patches.callback(shutil.rmtree, self.folder)
        clock = SimpleNamespace(monotonic=lambda: self.model.now)
        for module in CLOCK_USERS:
            self.patches.enter_context(patch.object(module, "time", clock))
        no_chance = SimpleNamespace(randbelow=lambda limit: 0)
        self.patches.enter_context(patch.object(trainer_request_handler, "secrets", no_chance))
        self.patches.enter_context(capture_logs())
        self.sent: list[Any] = []
        """Answers to the trainer."""
        self.granted: list[tuple[str, Lease]] = []
        """Each lease ever granted, with its worker."""
        self.results: list[tuple[str, Episode, list[bytes]]] = []
        """Each result ever sent, with its worker and payloads."""
        self.tickets: list[int] = []
        self.unusable: Unusable | None = None
        """The last request to set a group aside."""
        self.processes = {"w0": 1, "w1": 1}
        """Number of the current process of each worker."""
        self.num_payloads = 0

    def open(self) -> None:
        """Open the ledger, as a new process of the datapipe does."""
        fingerprint = {"group_size": str(len(MEMBERS))}
        self.ledger = Ledger(run_paths(self.config).ledger, fingerprint=fingerprint)
        ppo = self.config.trainer.ppo
        self.store = GroupStore(
            self.ledger, tasks(5), ppo=ppo, sampler=Permutation(5, seed=1, shuffle=True)
        )
        evals = EvalScheduler([], samples=1, max_attempts=MAX_ATTEMPTS)
        self.workers = Workers(ttl_s=TTL_S)
        self.outbox = Pending(self.ledger, self.sent)
        self.handler = TrainerRequestHandler(
            store=self.store,
            evals=evals,
            config=self.config,
            outbox=self.outbox,
            workers=self.workers,
        )
        self.outbox.handler = self.handler
        self.intake = Intake(
            store=self.store,
            evals=evals,
            workers=self.workers,
            rejections=self.handler.rejections,
            vocab_size=1 << 31,
        )
        for group in self.store.groups.values():
            for lease in group.leases.values():
                worker = group.owners[lease.lease_id]
                self.workers.assign(worker, lease, group.unfinished(lease))
        self.commit()

    def commit(self) -> None:
        self.outbox.commit()
        num_turns = sum(len(group.turns) for group in self.model.groups.values())
        assert (
            self.ledger.connection.execute("SELECT COUNT(*) FROM turns").fetchone()[0] == num_turns
        )
        self.committed = pickle.dumps(self.model)

    def last(self, kind: type[Any]) -> Any:
        """Return the last answer to the trainer, of this type."""
        assert isinstance(self.sent[-1], kind), self.sent[-1]
        return self.sent[-1]

    def serve(self) -> None:
        """Answer the requests that can be answered, as after each message."""
        self.handler.accept_pending_start()
        if answer := self.model.accept_start():
            self.check_start(answer)
        num_batches = self.store.next_step
        ready = self.handler.take_ready()
        must_compose = self.model.must_compose
        for step in range(num_batches, self.store.next_step):
            expected = self.model.compose()
            assert [group.group_id for group in self.store.batches[step]] == expected
            assert self.model.age(step) <= self.model.max_staleness
            must_compose = False
        assert not must_compose, "the batch has nothing to wait for"
        for _, request in ready:
            assert self.model.requests.pop(request.rank) == request.step
            self.check_batch(request)
        if ready:
            self.commit()

    def check_start(self, answer: str) -> None:
        assert type(self.sent[-1]).__name__ == answer
        self.commit()

    def check_batch(self, request: BatchRequest) -> None:
        """All ranks get the same batch, with the payloads that the workers sent."""
        batch = self.handler.shard(request)
        ids = [h.trajectory_id for h in batch.headers]
        expected = self.model.payloads(request.step)
        assert ids == [*expected]
        if request.rank == 0:
            self.ledger.commit()
            assert read_payloads(self.ledger.path, ids) == [*expected.values()]
        assert batch.mine == [n for n, rank in enumerate(batch.ranks) if rank == request.rank]
