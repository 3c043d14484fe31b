"""Messages of a trainer that come late: of one that is no more, or twice, by a slow connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arealite.api.trainer_messages import BatchRequest, Published, StepReport, TrainerStart
from arealite.system.datapipe import trainer_desk as datapipe_trainer
from arealite.system.datapipe.eval_book import EvalBook
from arealite.system.datapipe.group_book import GroupBook
from arealite.system.datapipe.trainer_desk import OutOfStep, TrainerDesk
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger.ledger import Ledger
from tests.system.scenes import episode, experiment, tasks

ROUTE = b"route"


class AtOnce:
    """A writer whose commits take no time."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def after_commit(self, callback: Callable[[], None], *, hurry: bool) -> None:
        self.ledger.commit()
        callback()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[TrainerDesk]:
    """At step 2: batches 0 and 1 are trained, version 2 is published."""
    config = experiment(tmp_path, num_groups=1, group_size=1)
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={})
    book = GroupBook(ledger, tasks(4), ppo=config.trainer.ppo, seed=1, shuffle=True)
    sent: list[Any] = []
    writer: Any = AtOnce(ledger)
    desk = TrainerDesk(
        book,
        EvalBook([], samples=1, max_attempts=1),
        config=config,
        send=lambda _, message: sent.append(message),
        workers=Workers(ttl_s=1.0),
        writer=writer,
    )
    desk.sent = sent  # type: ignore[attr-defined]
    desk.take(ROUTE, TrainerStart(0, 1, 1))
    desk.take(ROUTE, Published(0))
    for step in range(2):
        train(desk, step)
    yield desk
    ledger.close()


def train(desk: TrainerDesk, step: int) -> None:
    book = desk.book
    group = book.next_offer()
    assert group
    lease = book.lease(group, worker_id="w", credit=1)
    book.add(episode(lease, 0), [b""])
    (chosen,) = book.compose() or ()
    desk.take(ROUTE, StepReport(step, [h.trajectory_id for h in chosen.headers], {}))
    desk.take(ROUTE, Published(step + 1))


def test_a_start_that_comes_twice_rolls_nothing_back(desk: TrainerDesk) -> None:
    desk.take(ROUTE, TrainerStart(0, 1, 1))
    assert desk.book.known_steps() == 2
    assert desk.sent[-1] == datapipe_trainer.messages.TrainerReady(0, 0)  # type: ignore[attr-defined]
    desk.take(ROUTE, TrainerStart(0, 1, 2))
    assert desk.book.known_steps() == 0
    (again,) = desk.book.compose() or ()
    desk.take(ROUTE, StepReport(0, [h.trajectory_id for h in again.headers], {}))
    sent = len(desk.sent)  # type: ignore[attr-defined]
    desk.take(ROUTE, TrainerStart(0, 1, 1))
    assert desk.book.known_steps() == 1, "of a trainer that is no more"
    assert len(desk.sent) == sent  # type: ignore[attr-defined]


def test_tickets_grow_and_change_nothing(desk: TrainerDesk) -> None:
    """Also those of the datapipe's next start are larger than all before."""
    for _ in range(2):
        desk.take(ROUTE, TrainerStart(0, 1))
    first, second = desk.sent[-2:]  # type: ignore[attr-defined]
    assert 0 < first.number < second.number < 2 * first.number
    assert desk.book.known_steps() == 2


def test_steps_are_reported_in_order(desk: TrainerDesk) -> None:
    """A dead trainer's report of a later step made the ledger forget the one between."""
    desk.take(ROUTE, TrainerStart(0, 1, 2))
    batches = [desk.book.compose() or [] for _ in range(2)]
    ids = [[h.trajectory_id for group in groups for h in group.headers] for groups in batches]
    with pytest.raises(OutOfStep):
        desk.take(ROUTE, StepReport(1, ids[1], {}))
    for step in (0, 1):
        desk.take(ROUTE, StepReport(step, ids[step], {}))
    assert desk.book.known_steps() == 2
    assert desk.book.ledger.connection.execute("SELECT step FROM steps").fetchall() == [(0,), (1,)]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_late_version_is_not_taken(desk: TrainerDesk, late: int) -> None:
    """An older one would stop the leases for ever at η = 0; a later one is of steps rolled back."""
    desk.take(ROUTE, Published(late))
    assert desk.book.version == 2
    held = "SELECT value FROM meta WHERE key = 'version'"
    assert desk.book.ledger.connection.execute(held).fetchone() == ("2",)


def test_what_a_dead_trainer_says_after_a_roll_back_ends_nothing_else(desk: TrainerDesk) -> None:
    desk.take(ROUTE, TrainerStart(1, 1, 2))
    desk.take(ROUTE, Published(2))
    assert desk.book.version is None, "of steps rolled back"
    for late in (BatchRequest(2, 0, 1), StepReport(1, ["g1/0/agent"], {})):
        with pytest.raises(OutOfStep):
            desk.take(ROUTE, late)
    desk.take(ROUTE, Published(1))
    assert desk.book.version == 1
