"""Special requests of trainers; `test_histories` has late, resent and stale requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arealite.api.experiment_config import run_paths
from arealite.api.trainer_messages import (
    Checkpointed,
    Done,
    Finish,
    FromTrainer,
    Published,
    Refused,
    StepReport,
    TrainerReady,
    TrainerStart,
    Unusable,
    Waiting,
)
from arealite.ext.audit.audit import audit
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe import trainer_request_handler
from arealite.system.datapipe.effects import BeginTraining, Effect, FilterGroups, Outbox, Send
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.trainer_request_handler import OutOfStep, TrainerRequestHandler
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger.ledger import Ledger
from arealite.system.links.wire import STOP_WAITING
from tests.payloads import GARBAGE
from tests.system.scenes import episode, experiment, payload, tasks

ROUTE = b"route"


class AtOnce(Outbox):
    """Performs each effect at once, and commits the ledger before those that wait for it."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.sent: list[Any] = []
        self.handler: TrainerRequestHandler | None = None

    def send(self, route: bytes, message: Any, payloads: Sequence[bytes] = ()) -> None:
        self.sent.append(message)

    def after_commit(self, effect: Effect | None, *, hurry: bool = False) -> None:
        assert self.handler
        self.ledger.commit()
        match effect:
            case Send():
                self.send(effect.route, effect.message)
            case BeginTraining():
                self.handler.begin_training()
            case FilterGroups():
                self.handler.filter_groups(effect)


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[TrainerRequestHandler]:
    """A handler at step 2: batches 0 and 1 are trained, version 2 is published."""
    config = experiment(tmp_path, num_groups=1, group_size=1)
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={})
    store = GroupStore(
        ledger, tasks(4), ppo=config.trainer.ppo, sampler=Permutation(4, seed=1, shuffle=True)
    )
    outbox = AtOnce(ledger)
    handler = TrainerRequestHandler(
        store=store,
        evals=EvalScheduler([], samples=1, max_attempts=1),
        config=config,
        outbox=outbox,
        workers=Workers(ttl_s=1.0),
    )
    outbox.handler = handler
    begin(handler, 0, ticket=1)
    tell(handler, Published(version=0))
    for step in range(2):
        train(handler, step)
    yield handler
    ledger.close()


def sent(handler: TrainerRequestHandler) -> list[Any]:
    assert isinstance(handler.outbox, AtOnce)
    return handler.outbox.sent


def tell(handler: TrainerRequestHandler, request: FromTrainer) -> bool:
    """Handle a request of the current trainer."""
    return handler.take(ROUTE, msgspec.structs.replace(request, ticket=handler._ticket))


def begin(handler: TrainerRequestHandler, step: int, *, ticket: int) -> None:
    """Handle a start after the previous trainer died."""
    handler.last_request = min(handler.last_request, 0.0)
    handler.take(ROUTE, TrainerStart(step=step, world_size=1, ticket=ticket))


def collect(handler: TrainerRequestHandler, *, reward: float = 1.0) -> None:
    """Complete one more group."""
    group = handler.store.next_group()
    assert group
    lease = handler.store.lease(group, worker_id="w", credit=1)
    made = episode(lease, 0, reward=reward)
    handler.store.add_episode(made, [payload(made.headers[0])])


def train(handler: TrainerRequestHandler, step: int) -> None:
    collect(handler)
    (chosen,) = handler.store.compose() or ()
    tell(
        handler,
        StepReport(step=step, trained=[h.trajectory_id for h in chosen.headers], metrics={}),
    )
    tell(handler, Published(version=step + 1))


def test_tickets_grow_and_change_no_state(handler: TrainerRequestHandler) -> None:
    """Tickets after a restart of the datapipe are larger than all earlier tickets."""
    for _ in range(2):
        handler.take(ROUTE, TrainerStart(step=0, world_size=1))
    first, second = sent(handler)[-2:]
    assert 0 < first.number < second.number < 2 * first.number
    assert handler.store.num_trained_steps() == 2


# ---------------------------------------------------------------- tickets and starts


def test_tickets_grow_after_a_restart_however_many_were_given(
    handler: TrainerRequestHandler,
) -> None:
    """Otherwise the datapipe would serve no further trainer."""
    handler.store.ledger.set_meta("ticket", str(1 << 30))
    handler.store.ledger.commit()
    again = TrainerRequestHandler(
        store=handler.store,
        evals=handler.evals,
        config=handler.config,
        outbox=handler.outbox,
        workers=handler.workers,
    )
    again.take(ROUTE, TrainerStart(step=2, world_size=1))
    assert sent(handler)[-1].number > 1 << 30


def test_start_waits_while_the_previous_trainer_is_alive(handler: TrainerRequestHandler) -> None:
    tell(handler, Published(version=2))
    handler.take(ROUTE, TrainerStart(step=1, world_size=1, ticket=2))
    assert handler.store.num_trained_steps() == 2
    handler.send_waiting()
    (said,) = [m for m in sent(handler) if isinstance(m, Waiting)]
    assert said.request == "TrainerStart 1" and "the previous trainer, last request" in said.detail
    handler.last_request -= trainer_request_handler.TRAINER_ALIVE_S
    handler.accept_pending_start()
    assert handler.store.num_trained_steps() == 1
    assert sent(handler)[-1] == TrainerReady(step=1, rolled_back_groups=1)


def test_start_that_is_not_resent_is_dropped(handler: TrainerRequestHandler) -> None:
    """Otherwise a stray start would begin during the next long computation of the trainer."""
    tell(handler, Published(version=2))
    handler.take(ROUTE, TrainerStart(step=1, world_size=1, ticket=2))
    handler._start_received -= trainer_request_handler.TRAINER_GONE_S
    handler.accept_pending_start()
    handler.last_request -= trainer_request_handler.TRAINER_ALIVE_S
    handler.accept_pending_start()
    assert handler.store.num_trained_steps() == 2
    assert not [m for m in sent(handler)[1:] if isinstance(m, TrainerReady)]


def test_start_does_not_overtake_a_trainer_that_saves_its_last_steps(
    handler: TrainerRequestHandler,
) -> None:
    tell(handler, Published(version=2))
    handler.take(ROUTE, TrainerStart(step=1, world_size=1, ticket=2))
    tell(handler, Finish(reason=STOP_WAITING))
    handler.accept_pending_start()
    save(handler, 2)
    assert handler.store.num_trained_steps() == 2


@pytest.mark.parametrize("step", [0, 1, 3])
def test_start_that_contradicts_the_ledger_is_refused_and_stops_no_other(
    handler: TrainerRequestHandler, step: int
) -> None:
    """Its sender is a stray peer, or a restarted trainer without its newest checkpoint."""
    save(handler, 2)
    begin(handler, step, ticket=2)
    assert isinstance(sent(handler)[-1], Refused)
    assert handler.store.num_trained_steps() == 2
    assert tell(handler, Published(version=2)), "the trainer goes on"


def save(handler: TrainerRequestHandler, step: int, path: str = "") -> None:
    folder = run_paths(handler.config).checkpoints
    tell(handler, Checkpointed(step=step, path=path or str(folder / f"step-{step:06d}")))


@pytest.mark.parametrize(
    ("step", "path"),
    [(3, ""), (10**6, ""), (2, "/x"), (2, "{}/../../step-000002"), (2, "{}/a/b"), (2, "{}")],
)
def test_impossible_checkpoint_is_refused(
    handler: TrainerRequestHandler, step: int, path: str
) -> None:
    with pytest.raises(OutOfStep, match="impossible"):
        save(handler, step, path.format(run_paths(handler.config).checkpoints))
    assert handler.store.counts["durable"] == 0
    save(handler, 2)
    assert handler.store.counts["durable"] == 2


# ---------------------------------------------------------------- batches that cannot be trained


def test_unusable_batch_is_set_aside_and_composed_of_others(
    handler: TrainerRequestHandler,
) -> None:
    collect(handler)
    collect(handler, reward=0.0)
    (bad,) = handler.store.compose() or ()
    for _ in range(2):  # also if the request is repeated
        tell(handler, Unusable(step=2, groups={bad.group_id: "mask"}))
        assert sent(handler)[-1] == Done(request="Unusable 2")
    (other,) = handler.store.compose() or ()
    assert other.group_id != bad.group_id
    tell(handler, StepReport(step=2, trained=[h.trajectory_id for h in other.headers], metrics={}))
    handler.store.ledger.commit()
    report = audit(handler.store.ledger.path)
    assert report.ok, report.table()
    assert report.filtered_by_reason == {"unusable:mask": 1}
    assert f"set aside, because no rank could train them: {bad.group_id} (mask)" in report.table()


def test_group_with_a_garbled_payload_can_be_set_aside_and_audited(
    handler: TrainerRequestHandler,
) -> None:
    """Older versions stored payloads without decoding them."""
    group = handler.store.next_group()
    assert group
    lease = handler.store.lease(group, worker_id="w", credit=1)
    handler.store.add_episode(episode(lease, 0), [GARBAGE])
    assert handler.store.compose()
    tell(handler, Unusable(step=2, groups={group.group_id: "unreadable"}))
    assert handler.store.num_trained_steps() == 2 and handler.store.compose() is None
    report = audit(handler.store.ledger.path)
    assert report.ok, report.table()
