"""Connects a trainer rank to the datapipe; resends every request until it is answered.

All calls block. There is no event loop, because a rank has no other work while it waits.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import msgspec
import zmq

from arealite.api import trainer_messages as messages
from arealite.api.payloads import Payload, from_frames
from arealite.api.trainer_messages import Batch, EvalResult, FromTrainer, ToTrainer, Waiting
from arealite.base import log
from arealite.base.errors import InvariantError, RoleError
from arealite.system.health.waits import Wait
from arealite.system.links import wire
from arealite.system.names.name_registry import Secret

logger = log.get(__name__)

SILENT_S = 2.0
"""After this long without a message, the link resolves the datapipe's address again.

The datapipe sends a message each second while a request is pending."""
REPEAT_S = 5.0
"""Interval at which a pending request is resent; the datapipe drops a start that is not resent."""
POLL_MS = 250
UNNAMED = "no address in cluster.name_root, a folder that all hosts must share,"
"""Address of a datapipe that has no name in the registry."""

TrainerAnswer = tuple[ToTrainer, list[Payload]]
OnWait = Callable[[Waiting], bool] | None


@dataclass(eq=False, kw_only=True)
class TrainerLink:
    """The connection of one rank.

    Every request raises InvariantError if the datapipe refuses it, and RoleError if the datapipe is
    silent for `silence_s`. While a request waits, `on_wait` is called about once a second with the
    reason.
    """

    resolve: Callable[[], str | None]
    """Returns the datapipe's address; None: not known yet."""
    rank: int
    world_size: int
    silence_s: float = 30.0
    context: wire.Context | None = None
    secret: Secret | None = None

    def __post_init__(self) -> None:
        self.ticket = 0
        """Ticket from `start`. Set it on each link of the trainer before its first request."""
        self._socket: zmq.Socket[bytes] | None = None
        self._address: str | None = None
        self._evals: dict[int, messages.EvalRequest] = {}
        self._eval_results: list[EvalResult] = []

    def start(self, step: int) -> messages.TrainerReady:
        """Begin training at `step` (rank 0 only); the datapipe rolls the ledger back to it."""
        request = messages.TrainerStart(step=step, world_size=self.world_size)
        answer = self._request(request, lambda message: isinstance(message, messages.Ticket))
        ticket, _ = cast(tuple[messages.Ticket, list[Payload]], answer)
        self.ticket = ticket.number
        request = messages.TrainerStart(step=step, world_size=self.world_size, ticket=ticket.number)
        answer = self._request(request, lambda message: isinstance(message, messages.TrainerReady))
        ready, _ = cast(tuple[messages.TrainerReady, list[Payload]], answer)
        return ready

    def next_batch(
        self, step: int, *, on_wait: OnWait = None
    ) -> tuple[Batch, list[Payload]] | None:
        """Wait for this rank's shard of batch `step`.

        Args:
            step: Number of the batch, from 0.
            on_wait: Returns True to finish the run; then no rank gets a further batch.

        Returns:
            The shard and the payloads of `Batch.mine`; None if the run is finished.
        """

        def is_answer(message: ToTrainer) -> bool:
            is_batch = isinstance(message, Batch) and message.step == step
            return is_batch or isinstance(message, messages.Finished)

        def while_waiting(waiting: Waiting) -> bool:
            if on_wait is not None and on_wait(waiting):
                self._send(messages.Finish(reason=wire.STOP_WAITING))
            return False

        request = messages.BatchRequest(step=step, rank=self.rank, world_size=self.world_size)
        answer = self._request(request, is_answer, while_waiting)
        if answer is None:
            return None
        message, payloads = answer
        return (message, payloads) if isinstance(message, Batch) else None

    def report(self, message: FromTrainer) -> None:
        """Send a message whose answer is Done; return once the datapipe has stored it."""
        done = messages.Done(request=wire.request_name(message))
        self._request(message, lambda answer: answer == done)

    def evaluate(self, eval_id: int) -> None:
        """Request an evaluation that runs during training; `eval_result` returns its scores."""
        self._evals[eval_id] = messages.EvalRequest(eval_id=eval_id)
        self._send(self._evals[eval_id])

    def eval_result(self, *, wait: bool, on_wait: OnWait = None) -> EvalResult | None:
        """Return the scores of a requested evaluation; None if none has finished.

        Args:
            wait: Wait until one finishes, if any is running.
            on_wait: Returns True to stop waiting.
        """
        is_due = bool(self._evals) and not self._eval_results
        if is_due and wait:
            request = next(iter(self._evals.values()))
            self._request(request, lambda _: bool(self._eval_results), on_wait)
        elif is_due:
            while self._receive(block=False) is not None:
                pass
        if not self._eval_results:
            return None
        return self._eval_results.pop(0)

    def close(self, *, linger_ms: int = 1000) -> None:
        """Close the connection; wait at most `linger_ms` for sent messages to leave."""
        if self._socket is not None:
            wire.close(self._socket, linger_ms=linger_ms)
            self._socket = None

    # ------------------------------------------------------------ internals

    def _request(
        self,
        request: FromTrainer,
        is_answer: Callable[[ToTrainer], bool],
        on_wait: OnWait = None,
    ) -> TrainerAnswer | None:
        """Send a request until it is answered, and reconnect if the datapipe moved.

        Returns:
            The answer and its payloads; None if `on_wait` returned True.
        """
        name = wire.request_name(request)
        owner = f"trainer rank {self.rank}"
        with Wait(event=name, owner=owner, on="datapipe-0", replies_soon=True) as wait:
            begin = time.monotonic()
            reported_at = begin
            resolved_at = begin
            sent_at = begin
            self._send(request)
            while True:
                now = time.monotonic()
                silent_s = now - wait.last_sign
                waiting = None
                # Read first: after a pause of this process itself, messages may be queued.
                received = self._receive()
                if received is not None:
                    message, _ = received
                    if is_answer(message):
                        return received
                    waiting = message if isinstance(message, Waiting) else None
                    _note_message(wait, message)
                elif silent_s > self.silence_s:
                    address = self._address or UNNAMED
                    raise RoleError(
                        f"the datapipe at {address} has been silent for {silent_s:.0f} s; "
                        f"{owner} waits for the answer to '{name}'"
                    )
                elif now - max(wait.last_sign, resolved_at) > SILENT_S:
                    resolved_at = now
                    sent_at = now
                    self._reconnect(request)
                if now - sent_at > REPEAT_S:
                    sent_at = now
                    self._send(request)
                is_silent = received is None and silent_s > 1.0
                if is_silent and now - reported_at > 1.0:
                    waiting = Waiting(
                        request=name, detail=f"the datapipe, silent for {silent_s:.1f} s"
                    )
                if on_wait is None or waiting is None or waiting.request != name:
                    continue
                reported_at = now
                if on_wait(waiting):
                    return None

    def _receive(self, *, block: bool = True) -> TrainerAnswer | None:
        """Return the next message and its payloads; store the scores of evaluations.

        Returns:
            None if no message arrived within POLL_MS (or at once, if not `block`).

        Raises:
            InvariantError: the datapipe refused a request.
        """
        socket = self._socket
        if socket is None:
            time.sleep(POLL_MS / 1000)
            return None
        if not socket.poll(POLL_MS if block else 0):
            return None
        frames = socket.recv_multipart()
        message = wire.decode_to_trainer(frames[0])
        if isinstance(message, messages.Refused):
            raise InvariantError(f"the datapipe refused '{message.request}': {message.reason}")
        if isinstance(message, EvalResult):
            is_requested = self._evals.pop(message.eval_id, None) is not None
            if is_requested:
                self._eval_results.append(message)
        prompts = message.prompts if isinstance(message, messages.Batch) else []
        return message, from_frames(prompts, frames[1:])

    def _send(self, message: FromTrainer) -> None:
        if not isinstance(message, messages.TrainerStart):
            message = msgspec.structs.replace(message, ticket=self.ticket)
        if self._socket is None:
            self._connect()
        if self._socket is not None:
            with suppress(zmq.Again):  # no peer: it is resent after a reconnect
                self._socket.send(wire.encode(message), zmq.NOBLOCK)

    def _connect(self) -> None:
        self._address = self.resolve()
        if self._address is not None:
            self._socket = wire.open_socket(self.context, zmq.DEALER, self.secret)
            self._socket.connect(self._address)

    def _reconnect(self, request: FromTrainer) -> None:
        """Resolve the datapipe's address again, and resend all unanswered requests."""
        before = self._address
        if self._socket is not None and wire.count_refused(self._socket):
            logger.warning("no connection to the datapipe", address=before, why=wire.MISMATCH)
        self.close(linger_ms=0)
        self._connect()
        if self._address != before:
            logger.info("datapipe moved", address=self._address, before=before)
        self._send(request)
        for eval_request in list(self._evals.values()):
            if eval_request is not request:
                self._send(eval_request)


def _note_message(wait: Wait, message: ToTrainer) -> None:
    """Record a message of the datapipe as a sign of life, with the reason of the wait if known."""
    detail = message.detail if isinstance(message, Waiting) else ""
    wait.note_sign(detail)
