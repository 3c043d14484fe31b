"""The datapipe's machine alone: messages in, effects out, without a socket, a loop or a thread."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arealite.api.rollout_messages import Ack, WorkerState
from arealite.api.trainer_messages import (
    BatchRequest,
    Done,
    Published,
    Ticket,
    TrainerReady,
    TrainerStart,
)
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe import machine as machine_module
from arealite.system.datapipe.effects import AfterCommit, BeginTraining, Send, SendBatch, SendLease
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.machine import Machine
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger.ledger import Ledger
from arealite.system.links import wire
from tests.payloads import result_frames
from tests.system.scenes import episode, experiment, payload, tasks

WORKER = b"worker"
RANK = b"rank"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine with one group of two episodes in a batch."""
    config = experiment(tmp_path, num_groups=1, group_size=2)
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={})
    order = Permutation(4, seed=1, shuffle=True)
    yield Machine(
        config=config,
        store=GroupStore(ledger, tasks(4), ppo=config.trainer.ppo, sampler=order),
        evals=EvalScheduler([], samples=1, max_attempts=1),
        workers=Workers(ttl_s=600.0),
        vocab_size=1 << 31,
    )
    ledger.close()


def effects_of(machine: Machine, route: bytes, message: Any, *payloads: bytes) -> list[Any]:
    """Give a message to the machine; return what it asks for."""
    machine.receive([route, wire.encode(message), *payloads])
    return [*machine.outbox.take()]


def begin(machine: Machine) -> int:
    """Start a trainer and publish version 0; return the trainer's ticket."""
    (answer,) = effects_of(machine, RANK, TrainerStart(step=0, world_size=1))
    assert isinstance(answer.message, Ticket)
    ticket = answer.message.number
    start = TrainerStart(step=0, world_size=1, ticket=ticket)
    assert AfterCommit(effect=BeginTraining(), hurry=True) in effects_of(machine, RANK, start)
    machine.store.ledger.commit()
    machine.begin_training()
    (ready,) = machine.outbox.take()
    assert isinstance(ready, Send) and isinstance(ready.message, TrainerReady)
    done, *_ = effects_of(machine, RANK, Published(version=0, ticket=ticket))
    assert done.hurry and isinstance(done.effect.message, Done)
    return ticket


def test_each_answer_waits_for_the_commit_of_what_it_confirms(machine: Machine) -> None:
    ticket = begin(machine)
    state = WorkerState(worker_id="w", capacity=8, held=[], split_metrics={}, process="p")
    acknowledgement, granted, *_ = effects_of(machine, WORKER, state)
    assert acknowledgement == Send(route=WORKER, message=Ack(digest=b""))
    assert isinstance(granted, AfterCommit), "a lease is sent only once it is durable"
    assert isinstance(granted.effect, SendLease)
    lease = granted.effect.active.lease
    episodes = [episode(lease, member) for member in lease.members]
    payloads = [payload(header) for made in episodes for header in made.headers]
    requested = effects_of(machine, RANK, BatchRequest(step=0, rank=0, world_size=1, ticket=ticket))
    assert not requested, "there is no batch yet"
    result, frames = result_frames("w", episodes, payloads)
    answers = effects_of(machine, WORKER, result, *frames)
    kinds = [type(item.effect) for item in answers if isinstance(item, AfterCommit)]
    assert len(kinds) == len(answers), "nothing is confirmed before the commit"
    assert kinds[0] is Send and SendBatch in kinds
    assert machine.store.next_step == 1


def test_unreadable_message_changes_nothing(machine: Machine) -> None:
    machine.receive([RANK, b"\xff"])
    assert machine.outbox.take() == []
    assert machine.requests.rejections.total() == 1
    assert machine.error is None


def test_machine_imports_no_event_loop_and_no_sqlite() -> None:
    """Its module names neither asyncio, zmq, sqlite3 nor threads."""
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(inspect.getsource(machine_module)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
    }
    assert imported.isdisjoint({"asyncio", "concurrent", "sqlite3", "threading", "zmq"})
