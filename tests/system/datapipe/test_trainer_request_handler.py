"""Late, resent and stale requests of trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arealite.api.config import run_paths
from arealite.api.trainer_messages import (
    BatchRequest,
    Checkpointed,
    Done,
    EvalRequest,
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
from arealite.system.datapipe import trainer_request_handler
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.trainer_request_handler import OutOfStep, TrainerRequestHandler
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger.audit import audit
from arealite.system.ledger.ledger import Ledger
from arealite.system.links.wire import STOP_WAITING
from tests.system.scenes import episode, experiment, payload, tasks

ROUTE = b"route"


class AtOnce:
    """A writer that commits at once."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def after_commit(self, callback: Callable[[], None], *, hurry: bool) -> None:
        self.ledger.commit()
        callback()


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[TrainerRequestHandler]:
    """A handler at step 2: batches 0 and 1 are trained, version 2 is published."""
    config = experiment(tmp_path, num_groups=1, group_size=1)
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={})
    store = GroupStore(ledger, tasks(4), ppo=config.trainer.ppo, seed=1, shuffle=True)
    messages: list[Any] = []
    writer: Any = AtOnce(ledger)
    handler = TrainerRequestHandler(
        store,
        EvalScheduler([], samples=1, max_attempts=1),
        config=config,
        send=lambda _, message: messages.append(message),
        workers=Workers(ttl_s=1.0),
        writer=writer,
    )
    handler.sent = messages  # type: ignore[attr-defined]
    begin(handler, 0, ticket=1)
    tell(handler, Published(0))
    for step in range(2):
        train(handler, step)
    yield handler
    ledger.close()


def sent(handler: TrainerRequestHandler) -> list[Any]:
    return handler.sent  # type: ignore[attr-defined]


def tell(handler: TrainerRequestHandler, request: FromTrainer) -> bool:
    """Handle a request of the current trainer."""
    return handler.take(ROUTE, msgspec.structs.replace(request, ticket=handler._ticket))


def begin(handler: TrainerRequestHandler, step: int, *, ticket: int) -> None:
    """Handle a start after the previous trainer died."""
    handler.last_request = min(handler.last_request, 0.0)
    handler.take(ROUTE, TrainerStart(step, 1, ticket))


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
    tell(handler, StepReport(step, [h.trajectory_id for h in chosen.headers], {}))
    tell(handler, Published(step + 1))


def test_resent_start_rolls_nothing_back(handler: TrainerRequestHandler) -> None:
    handler.take(ROUTE, TrainerStart(0, 1, 1))
    assert handler.store.num_trained_steps() == 2
    assert sent(handler)[-1] == TrainerReady(0, 0)
    begin(handler, 0, ticket=2)
    assert handler.store.num_trained_steps() == 0
    (again,) = handler.store.compose() or ()
    tell(handler, StepReport(0, [h.trajectory_id for h in again.headers], {}))
    before = len(sent(handler))
    handler.take(ROUTE, TrainerStart(0, 1, 1))
    assert handler.store.num_trained_steps() == 1, "of a trainer that is no more"
    assert len(sent(handler)) == before


def test_tickets_grow_and_change_no_state(handler: TrainerRequestHandler) -> None:
    """Tickets after a restart of the datapipe are larger than all earlier tickets."""
    for _ in range(2):
        handler.take(ROUTE, TrainerStart(0, 1))
    first, second = sent(handler)[-2:]
    assert 0 < first.number < second.number < 2 * first.number
    assert handler.store.num_trained_steps() == 2


def test_steps_are_reported_in_order(handler: TrainerRequestHandler) -> None:
    """A report of a later step must not skip the step between."""
    begin(handler, 0, ticket=2)
    batches = [handler.store.compose() or [] for _ in range(2)]
    ids = [[h.trajectory_id for group in groups for h in group.headers] for groups in batches]
    with pytest.raises(OutOfStep):
        tell(handler, StepReport(1, ids[1], {}))
    for step in (0, 1):
        tell(handler, StepReport(step, ids[step], {}))
    assert handler.store.num_trained_steps() == 2
    assert handler.store.ledger.connection.execute("SELECT step FROM steps").fetchall() == [
        (0,),
        (1,),
    ]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_late_version_is_ignored(handler: TrainerRequestHandler, late: int) -> None:
    """An older version would block all leases at η = 0; a later version was rolled back."""
    tell(handler, Published(late))
    assert handler.store.version == 2
    held = "SELECT value FROM meta WHERE key = 'version'"
    assert handler.store.ledger.connection.execute(held).fetchone() == ("2",)


def test_request_of_a_dead_trainer_after_a_roll_back_stops_only_its_sender(
    handler: TrainerRequestHandler,
) -> None:
    begin(handler, 1, ticket=2)
    tell(handler, Published(2))
    assert handler.store.version is None, "of steps rolled back"
    for late in (BatchRequest(2, 0, 1), StepReport(1, ["g1/0/agent"], {})):
        with pytest.raises(OutOfStep):
            tell(handler, late)
    tell(handler, Published(1))
    assert handler.store.version == 1


# ---------------------------------------------------------------- tickets and starts


def test_requests_of_other_tickets_change_nothing(handler: TrainerRequestHandler) -> None:
    begin(handler, 2, ticket=2)
    before = sent(handler)[:]
    for request in (Published(2), BatchRequest(2, 0, 1), EvalRequest(7), Checkpointed(2, "/x")):
        assert not handler.take(ROUTE, request), "of nobody"
        assert not handler.take(ROUTE, msgspec.structs.replace(request, ticket=9)), "never given"
        with pytest.raises(OutOfStep, match="replaced"):
            handler.take(ROUTE, msgspec.structs.replace(request, ticket=1))
    assert sent(handler) == before
    assert not handler.evals.runs
    assert handler.rejections.total() == 8
    assert not handler.is_waiting


def test_ticket_of_the_current_trainer_survives_a_restart(
    handler: TrainerRequestHandler, tmp_path: Path
) -> None:
    handler.store.ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={})
    store = GroupStore(ledger, tasks(4), ppo=handler.store.ppo, seed=1, shuffle=True)
    handler.store = store
    writer: Any = AtOnce(ledger)
    again = TrainerRequestHandler(
        store,
        handler.evals,
        config=handler.config,
        send=handler.send,
        workers=handler.workers,
        writer=writer,
    )
    assert again.take(ROUTE, Published(2, ticket=1))
    ledger.close()


def test_tickets_grow_after_a_restart_however_many_were_given(
    handler: TrainerRequestHandler,
) -> None:
    """Otherwise the datapipe would serve no further trainer."""
    handler.store.ledger.set_meta("ticket", str(1 << 30))
    handler.store.ledger.commit()
    again = TrainerRequestHandler(
        handler.store,
        handler.evals,
        config=handler.config,
        send=handler.send,
        workers=handler.workers,
        writer=handler.writer,
    )
    again.take(ROUTE, TrainerStart(2, 1))
    assert sent(handler)[-1].number > 1 << 30


def test_start_waits_while_the_previous_trainer_is_alive(handler: TrainerRequestHandler) -> None:
    tell(handler, Published(2))
    handler.take(ROUTE, TrainerStart(1, 1, 2))
    assert handler.store.num_trained_steps() == 2
    handler.send_waiting()
    (said,) = [m for m in sent(handler) if isinstance(m, Waiting)]
    assert said.request == "TrainerStart 1" and "the previous trainer, last request" in said.detail
    handler.last_request -= trainer_request_handler.TRAINER_ALIVE_S
    handler.accept_pending_start()
    assert handler.store.num_trained_steps() == 1
    assert sent(handler)[-1] == TrainerReady(1, 1)


def test_start_that_is_not_resent_is_dropped(handler: TrainerRequestHandler) -> None:
    """Otherwise a stray start would begin during the next long computation of the trainer."""
    tell(handler, Published(2))
    handler.take(ROUTE, TrainerStart(1, 1, 2))
    handler._start_received -= trainer_request_handler.TRAINER_GONE_S
    handler.accept_pending_start()
    handler.last_request -= trainer_request_handler.TRAINER_ALIVE_S
    handler.accept_pending_start()
    assert handler.store.num_trained_steps() == 2
    assert not [m for m in sent(handler)[1:] if isinstance(m, TrainerReady)]


def test_start_does_not_overtake_a_trainer_that_saves_its_last_steps(
    handler: TrainerRequestHandler,
) -> None:
    tell(handler, Published(2))
    handler.take(ROUTE, TrainerStart(1, 1, 2))
    tell(handler, Finish(STOP_WAITING))
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
    assert tell(handler, Published(2)), "the trainer goes on"


def test_start_with_a_ticket_that_was_not_given_is_ignored(handler: TrainerRequestHandler) -> None:
    begin(handler, 0, ticket=1 << 39)
    assert handler.store.num_trained_steps() == 2
    begin(handler, 2, ticket=2)
    assert sent(handler)[-1] == TrainerReady(2, 0)


def save(handler: TrainerRequestHandler, step: int, path: str = "") -> None:
    folder = run_paths(handler.config).checkpoints
    tell(handler, Checkpointed(step, path or str(folder / f"step-{step:06d}")))


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
        tell(handler, Unusable(2, {bad.group_id: "mask"}))
        assert sent(handler)[-1] == Done("Unusable 2")
    (other,) = handler.store.compose() or ()
    assert other.group_id != bad.group_id
    tell(handler, StepReport(2, [h.trajectory_id for h in other.headers], {}))
    handler.store.ledger.commit()
    report = audit(handler.store.ledger.path)
    assert report.ok, report.table()
    assert report.filtered_by_reason == {"unusable:mask": 1}
    assert f"set aside, because no rank could train them: {bad.group_id} (mask)" in report.table()


def test_resent_unusable_keeps_the_recomposed_batch(
    handler: TrainerRequestHandler,
) -> None:
    """Some ranks may have the recomposed batch already."""
    collect(handler)
    collect(handler, reward=0.0)
    (bad,) = handler.store.compose() or ()
    tell(handler, Unusable(2, {bad.group_id: "mask"}))
    (other,) = handler.store.compose() or ()
    tell(handler, Unusable(2, {bad.group_id: "mask"}))
    assert handler.store.batches[2] == [other]
    assert handler.store.next_step == 3


def test_group_of_an_older_batch_is_not_set_aside(handler: TrainerRequestHandler) -> None:
    tell(handler, Unusable(1, {"g0": "mask", "g1": "mask"}))
    assert handler.store.num_trained_steps() == 2
    assert handler.store.counts["filtered"] == 0


def test_group_with_a_garbled_payload_can_be_set_aside_and_audited(
    handler: TrainerRequestHandler,
) -> None:
    """Older versions stored payloads without decoding them."""
    group = handler.store.next_group()
    assert group
    lease = handler.store.lease(group, worker_id="w", credit=1)
    handler.store.add_episode(episode(lease, 0), [b"garbage"])
    assert handler.store.compose()
    tell(handler, Unusable(2, {group.group_id: "unreadable"}))
    assert handler.store.num_trained_steps() == 2 and handler.store.compose() is None
    report = audit(handler.store.ledger.path)
    assert report.ok, report.table()
