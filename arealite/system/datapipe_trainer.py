"""Takes the trainer's requests: each is noted, made durable, and answered once however often it
comes.

Beside the datapipe's loop, because what a request means to the ledger has nothing to do with
workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec

from arealite.api.trainer_messages import (
    BatchRequest,
    Checkpointed,
    Done,
    EvalRequest,
    EvalResult,
    Finish,
    Finished,
    Published,
    Refused,
    StepReport,
    TrainerReady,
    TrainerStart,
    Waiting,
)
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.system import wire
from arealite.system.datapipe_evals import EvalBook
from arealite.system.datapipe_groups import GroupBook
from arealite.system.ledger_writer import LedgerWriter

logger = log.get(__name__)


class TrainerDesk:
    """What the trainer asked for and has not been given, and what its words change."""

    def __init__(
        self,
        book: GroupBook,
        evals: EvalBook,
        *,
        send: Callable[[bytes, msgspec.Struct], None],
        writer: LedgerWriter,
    ) -> None:
        self.book = book
        self.evals = evals
        self.batch_requests: dict[int, tuple[bytes, BatchRequest]] = {}
        """By rank: (whom to answer, what is asked)."""
        self.finish: Finish | None = None
        self.heard = self.asked = time.monotonic()
        """When the trainer last spoke, and when it last began to wait for episodes."""
        self.changed = True
        """Something happened since the last attempt to compose a batch."""
        self._eval_requests: dict[int, bytes] = {}
        self._start: tuple[bytes, TrainerStart] | None = None
        self._send = send
        self._writer = writer

    @property
    def is_waiting(self) -> bool:
        """Whether the trainer waits for episodes."""
        return bool(self.batch_requests or self._eval_requests)

    def take(self, route: bytes, request: wire.TrainerRequest) -> None:
        """Take in a request; answers leave once its changes are durable.

        Raises:
            InvariantError: it contradicts the ledger.
        """
        self.heard = time.monotonic()
        self.changed = True
        match request:
            case BatchRequest():
                self._take_batch_request(route, request)
            case EvalRequest():
                self._take_eval_request(route, request.eval_id)
            case TrainerStart():
                self._start = (route, request)
                self._writer.after_commit(self._begin)
            case _:
                self._note(request)
                done = Done(wire.request_name(request))
                self._writer.after_commit(partial(self._send, route, done))

    def take_ready(self) -> list[tuple[bytes, BatchRequest]]:
        """Return the batch requests that can be answered, and forget them."""
        ready = [pair for pair in self.batch_requests.values() if pair[1].step in self.book.batches]
        for _, request in ready:
            del self.batch_requests[request.rank]
        return ready

    def answer_evals(self) -> None:
        """Send the scores of finished evaluations, once the ledger has them."""
        for eval_id, metrics in self.evals.take_finished():
            self.book.ledger.add_eval(eval_id, metrics)
            route = self._eval_requests.pop(eval_id)
            self._writer.after_commit(partial(self._send, route, EvalResult(eval_id, metrics)))

    def tell_waiting(self, describe: Callable[[int], str], flight: str) -> None:
        """Tell everyone who waits what for; `flight` says who runs what."""
        for route, request in self.batch_requests.values():
            detail = f"{describe(request.step)}, {flight}"
            self._send(route, Waiting(wire.request_name(request), detail))
        for eval_id, route in self._eval_requests.items():
            run = self.evals.runs.get(eval_id)
            detail = f"evaluation {eval_id}: {run.left if run else 0} samples left, {flight}"
            self._send(route, Waiting(wire.request_name(EvalRequest(eval_id)), detail))

    def refuse(self, reason: str) -> None:
        """Tell everyone who waits that the run stops."""
        waiting: list[tuple[bytes, wire.TrainerRequest]] = [*self.batch_requests.values()]
        waiting += [(route, EvalRequest(eval_id)) for eval_id, route in self._eval_requests.items()]
        if self._start is not None:
            waiting.append(self._start)
        for route, request in waiting:
            self._send(route, Refused(wire.request_name(request), reason))

    # ------------------------------------------------------------ requests

    def _take_batch_request(self, route: bytes, request: BatchRequest) -> None:
        step, due = request.step, self.book.next_step
        if self.finish is not None:
            self._send(route, Finished(self.finish.reason))
        elif step > due:
            raise InvariantError(
                f"rank {request.rank} asks for batch {step}, but the next one is {due}"
            )
        elif step == due or step in self.book.batches:
            if not self.is_waiting:
                self.asked = time.monotonic()
            self.batch_requests[request.rank] = (route, request)

    def _take_eval_request(self, route: bytes, eval_id: int) -> None:
        if eval_id in self.evals.results:
            self._send(route, EvalResult(eval_id, self.evals.results[eval_id]))
            return
        if not self.is_waiting:
            self.asked = time.monotonic()
        self.evals.begin(eval_id)
        self._eval_requests[eval_id] = route

    def _begin(self) -> None:
        """Roll the ledger back to where the trainer begins. Between two commits, so that nobody
        else uses the connection."""
        if self._start is None:
            return
        route, start = self._start
        known = self.book.known_steps()
        if start.step > known:
            raise InvariantError(
                f"the trainer begins at step {start.step}, but {self.book.ledger.path} knows only "
                f"{known} trained steps: checkpoint and ledger are not of one trial"
            )
        rolled = self.book.roll_back(start.step)
        self.batch_requests.clear()
        self._eval_requests.clear()
        self.evals.forget(after=start.step)
        self._start = None
        self.changed = True
        logger.info("training begins", step=start.step, rolled_back_groups=rolled)
        self._send(route, TrainerReady(start.step, rolled))

    def _note(self, request: StepReport | Published | Checkpointed | Finish) -> None:
        ledger = self.book.ledger
        match request:
            case StepReport():
                self._note_step(request)
            case Published():
                self.book.version = request.version
                ledger.set_meta("version", str(request.version))
            case Checkpointed():
                self.book.mark_durable(request.step)
                ledger.checkpoint(request.step, request.path)
            case Finish():
                self._note_finish(request)

    def _note_step(self, report: StepReport) -> None:
        groups = self.book.batches.get(report.step)
        if groups is None or groups[0].state != "batched":
            if report.step < self.book.known_steps():
                return  # the answer to the first report was lost
            raise InvariantError(f"step {report.step} is reported, but its batch was never made")
        expected = sorted(h.trajectory_id for group in groups for h in group.headers)
        if sorted(report.trained) != expected:
            wrong = set(report.trained) ^ set(expected)
            raise InvariantError(
                f"step {report.step}: the trainer trained {len(report.trained)} trajectories, the "
                f"batch has {len(expected)}; they differ in {sorted(wrong)[:3]}"
            )
        self.book.mark_trained(report.step)
        self.book.ledger.train(report)

    def _note_finish(self, finish: Finish) -> None:
        logger.info("finishing", reason=finish.reason)
        if self.finish is None or self.finish.reason == wire.STOP_WAITING:
            self.finish = finish
        for route, _ in self.batch_requests.values():
            self._send(route, Finished(finish.reason))
        self.batch_requests.clear()
