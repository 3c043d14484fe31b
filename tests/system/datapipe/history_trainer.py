"""Events of trainers: starts, batches, reports, versions and checkpoints; see `test_histories`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from arealite.api.trainer_messages import (
    BatchRequest,
    Done,
    EvalRequest,
    FromTrainer,
    Published,
    StepReport,
    Ticket,
    TrainerReady,
    TrainerStart,
    Unusable,
)
from arealite.base.errors import InvariantError
from arealite.system.datapipe.trainer_request_handler import OutOfStep
from tests.system.datapipe.history_parts import PICK, ROUTE, event
from tests.system.datapipe.history_workers import WorkerEvents
from tests.system.datapipe.model import NUM_GROUPS, TRAINER_ALIVE_S
from tests.system.scenes import saved


class TrainerEvents(WorkerEvents):
    """The current trainer, its successors, and peers without a valid ticket."""

    def ask(self, request: FromTrainer) -> bool:
        """Handle a request of the current trainer."""
        self.model.last_request = self.model.now
        return self.handler.take(ROUTE, msgspec.structs.replace(request, ticket=self.model.ticket))

    @event(back=st.integers(-1, 2), is_silent=st.booleans())
    def start_trainer(self, back: int, is_silent: bool) -> None:
        """A trainer starts at an earlier step; it waits while the previous one is alive."""
        self.handler.take(ROUTE, TrainerStart(step=0, world_size=1))
        number = self.last(Ticket).number
        assert number > max(self.tickets, default=0)
        self.tickets.append(number)
        if is_silent:
            self.model.now += TRAINER_ALIVE_S
        step = max(0, self.model.num_trained - back)
        if self.model.last_request is None:  # a refused first start would stop the datapipe
            step = min(max(step, self.model.saved), self.model.num_trained)
        self.handler.take(ROUTE, TrainerStart(step=step, world_size=1, ticket=number))
        self.model.start = (step, number, self.model.now)
        if answer := self.model.accept_start():
            self.check_start(answer)
        self.serve()

    @event(pick=PICK)
    def start_again(self, pick: int) -> None:
        """A start that is resent, of an earlier trainer, or without a ticket changes nothing."""
        never_issued = (self.ledger.boot + 1) << 20
        numbers = [number for number in self.tickets if number <= self.model.ticket]
        number = [never_issued, *numbers][-1 - pick % (len(numbers) + 1)]
        num_answers = len(self.sent)
        self.handler.take(ROUTE, TrainerStart(step=0, world_size=1, ticket=number))
        is_current = number == self.model.ticket
        assert self.sent[num_answers:] == [TrainerReady(step=0, rolled_back_groups=0)] * is_current

    @event(step=st.integers(-1, 1), rank=st.integers(0, 1))
    def request_batch(self, step: int, rank: int) -> None:
        """A rank requests the next batch, one that it had already, or an impossible batch."""
        due = len(self.model.batches)
        step = max(0, due + step)
        request = BatchRequest(step=step, rank=rank, world_size=2)
        if step > due:
            with pytest.raises(OutOfStep):
                self.ask(request)
            return
        self.ask(request)
        if step == due or step in self.store.batches:
            self.model.requests[rank] = step
        self.serve()

    def train(self) -> None:
        """Train the next batch and publish its weights, if it is composed."""
        self.request_batch(step=0, rank=0)
        if self.model.num_trained < len(self.model.batches):
            self.report(kind="right")
        self.publish(0)

    def request_next(self) -> None:
        self.request_batch(step=0, rank=0)

    def reject_next(self) -> None:
        self.set_aside(place=0, step=0)

    def reject_again(self) -> None:
        """Resend the last request to set a group aside: the new batch stays."""
        if self.unusable is not None:
            self.ask(self.unusable)
            self.commit()
            self.serve()

    def go_back(self) -> None:
        """A new trainer begins one step earlier."""
        self.start_trainer(back=1, is_silent=True)
        self.publish(0)

    @event(kind=st.sampled_from(["right", "again", "skipped", "other ids"]))
    def report(self, kind: str) -> None:
        """A step counts once, in its order, and with exactly the trajectories of its batch."""
        step = self.model.num_trained
        is_composed = step < len(self.model.batches)
        if kind == "again" and step:
            self.ask(StepReport(step=step - 1, trained=[], metrics={}))
        elif kind == "skipped" or not is_composed:
            with pytest.raises(OutOfStep):
                self.ask(StepReport(step=step + (kind == "skipped"), trained=[], metrics={}))
        elif kind == "other ids":
            with pytest.raises(InvariantError, match="they differ in"):
                self.ask(
                    StepReport(step=step, trained=[*self.model.payloads(step)][:-1], metrics={})
                )
        elif kind == "right":
            self.ask(StepReport(step=step, trained=[*self.model.payloads(step)], metrics={}))
            self.model.num_trained += 1
        self.commit()
        self.serve()

    @event(back=st.integers(-1, 2))
    def publish(self, back: int) -> None:
        """A version counts unless it is older, or none of the trained steps has made it."""
        version = max(0, self.model.num_trained - back)
        self.ask(Published(version=version))
        if (self.model.version or 0) <= version <= self.model.num_trained:
            self.model.version = version
        self.commit()
        self.serve()

    @event(ahead=st.integers(-1, 1))
    def save_checkpoint(self, ahead: int) -> None:
        step = max(self.model.saved, self.model.num_trained + ahead)
        request = saved(self.config, step)
        if step > self.model.num_trained:
            with pytest.raises(OutOfStep, match="impossible"):
                self.ask(request)
            return
        self.ask(request)
        self.model.saved = step
        self.commit()

    @event(place=st.integers(0, NUM_GROUPS - 1), step=st.integers(-1, 0))
    def set_aside(self, place: int, step: int) -> None:
        """A rank cannot train a group; the batch is composed again of others."""
        step += self.model.num_trained
        if not 0 <= step < len(self.model.batches):
            return
        group_id = self.model.batches[step][place]
        self.ask(Unusable(step=step, groups={group_id: "mask"}))
        assert self.last(Done) == Done(request=f"Unusable {step}")
        if step == self.model.num_trained:
            self.model.set_aside(group_id)
            self.unusable = Unusable(step=step, groups={group_id: "mask"})
        self.commit()
        self.serve()

    @event(pick=PICK, kind=st.sampled_from(["none", "unknown", "old"]))
    def request_without_ticket(self, pick: int, kind: str) -> None:
        """A request of any other trainer changes nothing, and has no answer."""
        old = [number for number in self.tickets if number < self.model.ticket]
        tickets = {"none": 0, "unknown": self.model.ticket + 1, "old": old[-1] if old else 0}
        step = self.model.num_trained
        requests: list[Any] = [
            Published(version=step),
            BatchRequest(step=len(self.model.batches), rank=0, world_size=1),
            saved(self.config, step),
            Unusable(step=step, groups={"g0": "mask"}),
            StepReport(step=step, trained=[], metrics={}),
            EvalRequest(eval_id=step),
        ]
        request = requests[pick % len(requests)]
        num_answers = len(self.sent)
        request = msgspec.structs.replace(request, ticket=tickets[kind])
        if 0 < request.ticket < self.model.ticket:
            with pytest.raises(OutOfStep, match="replaced"):
                self.handler.take(ROUTE, request)
        else:
            assert not self.handler.take(ROUTE, request)
            self.model.rejections += 1
        assert len(self.sent) == num_answers
        assert not self.handler.evals.runs
