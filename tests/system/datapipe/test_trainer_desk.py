"""Messages of a trainer that come late: of one that is no more, or twice, by a slow connection."""

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
from arealite.system.datapipe import trainer_desk as datapipe_trainer
from arealite.system.datapipe.eval_book import EvalBook
from arealite.system.datapipe.group_book import GroupBook
from arealite.system.datapipe.trainer_desk import OutOfStep, TrainerDesk
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger.audit import audit
from arealite.system.ledger.ledger import Ledger
from arealite.system.links.wire import STOP_WAITING
from tests.system.scenes import episode, experiment, payload, tasks

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
    messages: list[Any] = []
    writer: Any = AtOnce(ledger)
    desk = TrainerDesk(
        book,
        EvalBook([], samples=1, max_attempts=1),
        config=config,
        send=lambda _, message: messages.append(message),
        workers=Workers(ttl_s=1.0),
        writer=writer,
    )
    desk.sent = messages  # type: ignore[attr-defined]
    begin(desk, 0, ticket=1)
    tell(desk, Published(0))
    for step in range(2):
        train(desk, step)
    yield desk
    ledger.close()


def sent(desk: TrainerDesk) -> list[Any]:
    return desk.sent  # type: ignore[attr-defined]


def tell(desk: TrainerDesk, request: FromTrainer) -> bool:
    """A request of the trainer that runs."""
    return desk.take(ROUTE, msgspec.structs.replace(request, ticket=desk._ticket))


def begin(desk: TrainerDesk, step: int, *, ticket: int) -> None:
    """A start once the trainer before is dead."""
    desk.heard = min(desk.heard, 0.0)
    desk.take(ROUTE, TrainerStart(step, 1, ticket))


def collect(desk: TrainerDesk, *, reward: float = 1.0) -> None:
    """One more complete group."""
    group = desk.book.next_offer()
    assert group
    lease = desk.book.lease(group, worker_id="w", credit=1)
    made = episode(lease, 0, reward=reward)
    desk.book.add(made, [payload(made.headers[0])])


def train(desk: TrainerDesk, step: int) -> None:
    collect(desk)
    (chosen,) = desk.book.compose() or ()
    tell(desk, StepReport(step, [h.trajectory_id for h in chosen.headers], {}))
    tell(desk, Published(step + 1))


def test_a_start_that_comes_twice_rolls_nothing_back(desk: TrainerDesk) -> None:
    desk.take(ROUTE, TrainerStart(0, 1, 1))
    assert desk.book.known_steps() == 2
    assert sent(desk)[-1] == TrainerReady(0, 0)
    begin(desk, 0, ticket=2)
    assert desk.book.known_steps() == 0
    (again,) = desk.book.compose() or ()
    tell(desk, StepReport(0, [h.trajectory_id for h in again.headers], {}))
    before = len(sent(desk))
    desk.take(ROUTE, TrainerStart(0, 1, 1))
    assert desk.book.known_steps() == 1, "of a trainer that is no more"
    assert len(sent(desk)) == before


def test_tickets_grow_and_change_nothing(desk: TrainerDesk) -> None:
    """Also those of the datapipe's next start are larger than all before."""
    for _ in range(2):
        desk.take(ROUTE, TrainerStart(0, 1))
    first, second = sent(desk)[-2:]
    assert 0 < first.number < second.number < 2 * first.number
    assert desk.book.known_steps() == 2


def test_steps_are_reported_in_order(desk: TrainerDesk) -> None:
    """A dead trainer's report of a later step made the ledger forget the one between."""
    begin(desk, 0, ticket=2)
    batches = [desk.book.compose() or [] for _ in range(2)]
    ids = [[h.trajectory_id for group in groups for h in group.headers] for groups in batches]
    with pytest.raises(OutOfStep):
        tell(desk, StepReport(1, ids[1], {}))
    for step in (0, 1):
        tell(desk, StepReport(step, ids[step], {}))
    assert desk.book.known_steps() == 2
    assert desk.book.ledger.connection.execute("SELECT step FROM steps").fetchall() == [(0,), (1,)]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_late_version_is_not_taken(desk: TrainerDesk, late: int) -> None:
    """An older one would stop the leases for ever at η = 0; a later one is of steps rolled back."""
    tell(desk, Published(late))
    assert desk.book.version == 2
    held = "SELECT value FROM meta WHERE key = 'version'"
    assert desk.book.ledger.connection.execute(held).fetchone() == ("2",)


def test_what_a_dead_trainer_says_after_a_roll_back_ends_nothing_else(desk: TrainerDesk) -> None:
    begin(desk, 1, ticket=2)
    tell(desk, Published(2))
    assert desk.book.version is None, "of steps rolled back"
    for late in (BatchRequest(2, 0, 1), StepReport(1, ["g1/0/agent"], {})):
        with pytest.raises(OutOfStep):
            tell(desk, late)
    tell(desk, Published(1))
    assert desk.book.version == 1


# ---------------------------------------------------------------- who is served


def test_requests_of_other_tickets_change_nothing(desk: TrainerDesk) -> None:
    begin(desk, 2, ticket=2)
    before = sent(desk)[:]
    for request in (Published(2), BatchRequest(2, 0, 1), EvalRequest(7), Checkpointed(2, "/x")):
        assert not desk.take(ROUTE, request), "of nobody"
        assert not desk.take(ROUTE, msgspec.structs.replace(request, ticket=9)), "never given"
        with pytest.raises(OutOfStep, match="replaced"):
            desk.take(ROUTE, msgspec.structs.replace(request, ticket=1))
    assert sent(desk) == before
    assert not desk.evals.runs
    assert desk.rejections.total() == 8
    assert not desk.is_waiting


def test_ticket_of_the_trainer_that_runs_outlives_the_datapipe(
    desk: TrainerDesk, tmp_path: Path
) -> None:
    desk.book.ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={})
    book = GroupBook(ledger, tasks(4), ppo=desk.book.ppo, seed=1, shuffle=True)
    desk.book = book
    writer: Any = AtOnce(ledger)
    again = TrainerDesk(
        book, desk.evals, config=desk._config, send=desk._send, workers=desk._workers, writer=writer
    )
    assert again.take(ROUTE, Published(2, ticket=1))
    ledger.close()


def test_tickets_grow_after_a_restart_however_many_were_given(desk: TrainerDesk) -> None:
    """Else the datapipe would serve no trainer any more."""
    desk.book.ledger.set_meta("ticket", str(1 << 30))
    desk.book.ledger.commit()
    again = TrainerDesk(
        desk.book,
        desk.evals,
        config=desk._config,
        send=desk._send,
        workers=desk._workers,
        writer=desk._writer,
    )
    again.take(ROUTE, TrainerStart(2, 1))
    assert sent(desk)[-1].number > 1 << 30


def test_start_waits_while_the_trainer_before_is_alive(desk: TrainerDesk) -> None:
    tell(desk, Published(2))
    desk.take(ROUTE, TrainerStart(1, 1, 2))
    assert desk.book.known_steps() == 2
    desk.tell_waiting()
    (said,) = [m for m in sent(desk) if isinstance(m, Waiting)]
    assert said.request == "TrainerStart 1" and "the previous trainer, heard" in said.detail
    desk.heard -= datapipe_trainer.ALIVE_S
    desk.begin_if_free()
    assert desk.book.known_steps() == 1
    assert sent(desk)[-1] == TrainerReady(1, 1)


def test_start_that_is_not_repeated_is_forgotten(desk: TrainerDesk) -> None:
    """A stray one would begin the next time that the trainer computes for long."""
    tell(desk, Published(2))
    desk.take(ROUTE, TrainerStart(1, 1, 2))
    desk._start_heard -= datapipe_trainer.GONE_S
    desk.begin_if_free()
    desk.heard -= datapipe_trainer.ALIVE_S
    desk.begin_if_free()
    assert desk.book.known_steps() == 2
    assert not [m for m in sent(desk)[1:] if isinstance(m, TrainerReady)]


def test_start_does_not_overtake_a_trainer_that_saves_its_last_steps(desk: TrainerDesk) -> None:
    tell(desk, Published(2))
    desk.take(ROUTE, TrainerStart(1, 1, 2))
    tell(desk, Finish(STOP_WAITING))
    desk.begin_if_free()
    save(desk, 2)
    assert desk.book.known_steps() == 2


@pytest.mark.parametrize("step", [0, 1, 3])
def test_start_that_contradicts_the_ledger_is_refused_and_stops_nobody(
    desk: TrainerDesk, step: int
) -> None:
    """Its sender is a stray peer, or a restarted trainer without its newest checkpoint."""
    save(desk, 2)
    begin(desk, step, ticket=2)
    assert isinstance(sent(desk)[-1], Refused)
    assert desk.book.known_steps() == 2
    assert tell(desk, Published(2)), "the trainer goes on"


def test_start_with_a_ticket_that_was_not_given_is_ignored(desk: TrainerDesk) -> None:
    begin(desk, 0, ticket=1 << 39)
    assert desk.book.known_steps() == 2
    begin(desk, 2, ticket=2)
    assert sent(desk)[-1] == TrainerReady(2, 0)


def save(desk: TrainerDesk, step: int, path: str = "") -> None:
    folder = run_paths(desk._config).checkpoints
    tell(desk, Checkpointed(step, path or str(folder / f"step-{step:06d}")))


@pytest.mark.parametrize(
    ("step", "path"),
    [(3, ""), (10**6, ""), (2, "/x"), (2, "{}/../../step-000002"), (2, "{}/a/b"), (2, "{}")],
)
def test_impossible_checkpoint_is_refused(desk: TrainerDesk, step: int, path: str) -> None:
    with pytest.raises(OutOfStep, match="impossible"):
        save(desk, step, path.format(run_paths(desk._config).checkpoints))
    assert desk.book.counts["durable"] == 0
    save(desk, 2)
    assert desk.book.counts["durable"] == 2


# ---------------------------------------------------------------- batches that cannot be trained


def test_unusable_batch_is_set_aside_and_composed_of_others(desk: TrainerDesk) -> None:
    collect(desk)
    collect(desk, reward=0.0)
    (bad,) = desk.book.compose() or ()
    for _ in range(2):  # also if the request comes twice
        tell(desk, Unusable(2, {bad.group_id: "mask"}))
        assert sent(desk)[-1] == Done("Unusable 2")
    (other,) = desk.book.compose() or ()
    assert other.group_id != bad.group_id
    tell(desk, StepReport(2, [h.trajectory_id for h in other.headers], {}))
    desk.book.ledger.commit()
    report = audit(desk.book.ledger.path)
    assert report.ok, report.table()
    assert report.filtered_by_reason == {"unusable:mask": 1}
    assert f"set aside, because no rank could train them: {bad.group_id} (mask)" in report.table()


def test_late_repetition_of_unusable_keeps_the_batch_composed_since(desk: TrainerDesk) -> None:
    """Some ranks may have that batch already."""
    collect(desk)
    collect(desk, reward=0.0)
    (bad,) = desk.book.compose() or ()
    tell(desk, Unusable(2, {bad.group_id: "mask"}))
    (other,) = desk.book.compose() or ()
    tell(desk, Unusable(2, {bad.group_id: "mask"}))
    assert desk.book.batches[2] == [other]
    assert desk.book.next_step == 3


def test_group_of_an_older_batch_is_not_set_aside(desk: TrainerDesk) -> None:
    tell(desk, Unusable(1, {"g0": "mask", "g1": "mask"}))
    assert desk.book.known_steps() == 2
    assert desk.book.counts["filtered"] == 0


def test_group_with_a_garbled_payload_can_be_set_aside_and_audited(desk: TrainerDesk) -> None:
    """As of a ledger that an older version wrote, which stored what no one had decoded."""
    group = desk.book.next_offer()
    assert group
    lease = desk.book.lease(group, worker_id="w", credit=1)
    desk.book.add(episode(lease, 0), [b"garbage"])
    assert desk.book.compose()
    tell(desk, Unusable(2, {group.group_id: "unreadable"}))
    assert desk.book.known_steps() == 2 and desk.book.compose() is None
    report = audit(desk.book.ledger.path)
    assert report.ok, report.table()
