"""Attempts of a faulty trainer with the secret: only its requests are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from arealite.api import trainer_messages as trainer
from arealite.system.ledger.ledger import connect, meta_number
from arealite.system.links import wire
from tests.attacks.conftest import Live
from tests.attacks.peers import Insider, insider
from tests.e2e.conftest import SLOW_S
from tests.hostile import HOSTILE

pytestmark = [pytest.mark.attacks, pytest.mark.part, pytest.mark.timeout(2 * SLOW_S)]


@pytest.fixture
def rank(live: Live) -> Iterator[Insider]:
    with insider(live, "broken-rank") as peer:
        yield peer


def current_ticket(live: Live) -> int:
    """Return the current trainer's ticket from the ledger."""
    with closing(connect(live.paths.ledger, read_only=True)) as db:
        return meta_number(db, "ticket")


def mine(live: Live, step: int) -> str:
    return str(live.paths.checkpoints / f"step-{step:06d}")


REQUESTS: dict[str, trainer.FromTrainer] = {
    "batch request": trainer.BatchRequest(step=0, rank=0, world_size=2),
    "batch request of many ranks": trainer.BatchRequest(step=0, rank=0, world_size=1 << 16),
    "batch request of the future": trainer.BatchRequest(step=1 << 40, rank=0, world_size=2),
    "step report": trainer.StepReport(step=0, trained=[], metrics={}),
    "step report with hostile metrics": trainer.StepReport(
        step=0, trained=[HOSTILE], metrics={HOSTILE: 1e300}
    ),
    "unusable": trainer.Unusable(step=0, groups={f"g{n}": "wrong" for n in range(1000)}),
    "published": trainer.Published(version=10**9),
    "published first": trainer.Published(version=0),
    "checkpointed": trainer.Checkpointed(step=10**6, path="/x"),
    "checkpointed 0": trainer.Checkpointed(step=0, path="/etc/passwd"),
    "evaluation": trainer.EvalRequest(eval_id=1 << 40),
    "finish": trainer.Finish(reason="a broken rank says so"),
    "finish with hostile words": trainer.Finish(reason=HOSTILE),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request_without_a_ticket_is_counted(live: Live, rank: Insider, name: str) -> None:
    before = live.rejected()
    rank.send_message(REQUESTS[name])
    rank.wait_until_handled()
    live.counts(before, 1)


@pytest.mark.parametrize("name", REQUESTS)
def test_request_with_an_old_ticket_is_refused(live: Live, rank: Insider, name: str) -> None:
    before = live.rejected()
    rank.send_message(msgspec.structs.replace(REQUESTS[name], ticket=1))
    assert "replaced" in rank.receive(trainer.Refused).reason
    live.counts(before, 1)


@pytest.mark.parametrize("name", REQUESTS)
def test_request_with_a_future_ticket_is_counted(live: Live, rank: Insider, name: str) -> None:
    before = live.rejected()
    rank.send_message(msgspec.structs.replace(REQUESTS[name], ticket=1 << 40))
    rank.wait_until_handled()
    live.counts(before, 1)


IMPOSSIBLE: dict[str, Callable[[Live], trainer.FromTrainer]] = {
    "a batch of the future": lambda live: trainer.BatchRequest(step=10**6, rank=0, world_size=2),
    "a report of a step of the future": lambda live: trainer.StepReport(
        step=10**6, trained=[], metrics={}
    ),
    "a checkpoint of the future": lambda live: trainer.Checkpointed(
        step=10**6, path=mine(live, 10**6)
    ),
    "a checkpoint elsewhere": lambda live: trainer.Checkpointed(step=1, path="/tmp/step-000001"),
    "a checkpoint above": lambda live: trainer.Checkpointed(
        step=1, path=mine(live, 1) + "/../../x"
    ),
    "a checkpoint of no path": lambda live: trainer.Checkpointed(step=1, path=""),
    "a checkpoint of a long path": lambda live: trainer.Checkpointed(step=1, path="/x" * 100_000),
    "a checkpoint with a null": lambda live: trainer.Checkpointed(step=1, path="/x\0y"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_request_of_the_current_trainer_is_refused(
    live: Live, rank: Insider, name: str
) -> None:
    before = live.rejected()
    request = IMPOSSIBLE[name](live)
    rank.send_message(msgspec.structs.replace(request, ticket=current_ticket(live)))
    assert rank.receive(trainer.Refused).reason
    live.counts(before, 1)
    with closing(connect(live.paths.ledger, read_only=True)) as db:
        (newest,) = db.execute("SELECT IFNULL(MAX(step), 0) FROM checkpoints").fetchone()
    assert newest <= live.step() + 5


@pytest.mark.parametrize("version", [10**9, 1 << 40])
def test_future_version_is_ignored(live: Live, rank: Insider, version: int) -> None:
    rank.send_message(trainer.Published(version=version, ticket=current_ticket(live)))
    rank.receive(trainer.Done)
    live.wait_for_steps()
    with closing(connect(live.paths.ledger, read_only=True)) as db:
        assert meta_number(db, "version") <= live.step() + 5


@pytest.mark.parametrize("step", [0, 1, 10**6, 1 << 40])
def test_stray_start_rolls_nothing_back(live: Live, rank: Insider, step: int) -> None:
    """The start stays unanswered as long as another trainer is alive, also at the end."""
    before = live.step()
    rank.send_message(trainer.TrainerStart(step=step, world_size=1))
    ticket = rank.receive(trainer.Ticket).number
    rank.send_message(trainer.TrainerStart(step=step, world_size=1, ticket=ticket))
    rank.receive(trainer.Waiting)
    live.wait_for_steps(5)
    assert live.step() > before


@pytest.mark.parametrize("ticket", [1, 1 << 39, 1 << 40])
def test_start_with_a_ticket_that_was_not_given_is_ignored(
    live: Live, rank: Insider, ticket: int
) -> None:
    rank.send_message(trainer.TrainerStart(step=0, world_size=1, ticket=ticket))
    rank.wait_until_handled()
    live.wait_for_steps()


def test_start_with_the_current_ticket_rolls_nothing_back(live: Live, rank: Insider) -> None:
    before = live.step()
    rank.send_message(trainer.TrainerStart(step=0, world_size=1, ticket=current_ticket(live)))
    assert rank.receive(trainer.TrainerReady).rolled_back_groups == 0
    live.wait_for_steps()
    assert live.step() > before


RAW: dict[str, dict[str, Any]] = {
    "evaluation": {"type": "EvalRequest", "eval_id": 2**64 - 1},
    "negative evaluation": {"type": "EvalRequest", "eval_id": -1},
    "negative step": {"type": "TrainerStart", "step": -1, "world_size": 1},
    "huge step": {"type": "TrainerStart", "step": 2**63, "world_size": 1},
    "no ranks": {"type": "BatchRequest", "step": 0, "rank": 0, "world_size": 0},
    "too many ranks": {"type": "BatchRequest", "step": 0, "rank": 0, "world_size": 1 << 32},
    "negative rank": {"type": "BatchRequest", "step": 0, "rank": -1, "world_size": 2},
    "step of words": {"type": "StepReport", "step": "0", "trained": [], "metrics": {}},
    "step of a fraction": {"type": "StepReport", "step": 0.5, "trained": [], "metrics": {}},
    "metrics of words": {"type": "StepReport", "step": 0, "trained": [], "metrics": {"a": "b"}},
    "a nested report": {"type": "StepReport", "step": 0, "trained": [[[]]], "metrics": {}},
    "huge version": {"type": "Published", "version": 2**64 - 1},
    "path of bytes": {"type": "Checkpointed", "step": 1, "path": b"/x"},
    "groups of numbers": {"type": "Unusable", "step": 0, "groups": {0: 1}},
    "huge ticket": {"type": "Finish", "reason": "x", "ticket": 2**64 - 1},
    "no reason": {"type": "Finish"},
}


@pytest.mark.parametrize("name", RAW)
def test_request_out_of_range_or_of_a_wrong_type_is_counted(
    live: Live, rank: Insider, name: str
) -> None:
    before = live.rejected()
    rank.send(msgspec.msgpack.encode(RAW[name]))
    rank.wait_until_handled()
    live.counts(before, 1)


@pytest.mark.parametrize("end", [1, 2, 5])
def test_truncated_request_is_counted(live: Live, rank: Insider, end: int) -> None:
    before = live.rejected()
    rank.send(wire.encode(trainer.Checkpointed(step=1, path="/x"))[:-end])
    rank.wait_until_handled()
    live.counts(before, 1)
