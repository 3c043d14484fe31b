"""Connects a trainer rank to the datapipe: every request is sent until it is answered.

Blocking and without an event loop, because a rank does nothing else while it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import zmq

from arealite.api.trainer_messages import (
    Batch,
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
from arealite.base.errors import InvariantError, RoleError
from arealite.system import wire

logger = log.get(__name__)

SILENT_S = 2.0
"""A datapipe that is asked something answers at least once a second; after this long it is looked
up again."""
POLL_MS = 250

Answer = tuple[wire.ToTrainer, list[bytes]]


class TrainerLink:
    """One rank's connection. Raises InvariantError when the datapipe refuses a request, RoleError
    when it is silent for `silence_s`."""

    def __init__(
        self,
        resolve: Callable[[], str | None],
        *,
        rank: int,
        world_size: int,
        silence_s: float = 10.0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.silence_s = silence_s
        self._resolve = resolve
        self._context = context or cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
        self._socket: zmq.Socket[bytes] | None = None
        self._address: str | None = None
        self._evals: dict[int, EvalRequest] = {}
        self._eval_results: list[EvalResult] = []

    def start(self, step: int) -> TrainerReady:
        """Tell where training begins (rank 0 only); the ledger is rolled back to it."""
        answer, _ = self._ask(TrainerStart(step, self.world_size), self._is_answer(TrainerReady))
        return cast(TrainerReady, answer)

    def next_batch(
        self, step: int, *, on_wait: Callable[[Waiting], bool] | None = None
    ) -> tuple[Batch, list[bytes]] | None:
        """Wait for this rank's shard of batch `step` and its payloads; None: the run is finished.

        `on_wait` is called about once a second with who is waited for; True asks to finish.
        """

        def is_answer(message: wire.ToTrainer) -> bool:
            return isinstance(message, Finished) or (
                isinstance(message, Batch) and message.step == step
            )

        request = BatchRequest(step, self.rank, self.world_size)
        answer, payloads = self._ask(request, is_answer, on_wait=on_wait)
        return (answer, payloads) if isinstance(answer, Batch) else None

    def report(self, report: StepReport) -> None:
        """Tell that the optimizer has applied a batch."""
        self._tell(report)

    def published(self, version: int) -> None:
        """Tell that every server in traffic has confirmed `version`."""
        self._tell(Published(version))

    def checkpointed(self, step: int, path: str) -> None:
        """Tell that a checkpoint with all steps before `step` is durable."""
        self._tell(Checkpointed(step, path))

    def finish(self, reason: str) -> None:
        """Tell that there will be no further step."""
        self._tell(Finish(reason))

    def evaluate(self, eval_id: int) -> None:
        """Ask for an evaluation beside training; `eval_result` gives its answer."""
        self._evals[eval_id] = EvalRequest(eval_id)
        if self._socket is None:
            self._connect()
        self._send(self._evals[eval_id])

    def eval_result(self, *, wait: bool) -> EvalResult | None:
        """Return the scores of an evaluation asked for; None when there are none yet (`wait` waits
        for the next one while any is under way)."""
        if not self._eval_results and self._evals:
            if wait:
                self._ask(next(iter(self._evals.values())), self._is_answer(EvalResult))
            else:
                self._receive_all()
        return self._eval_results.pop(0) if self._eval_results else None

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close(linger=1000)
            self._socket = None

    # ------------------------------------------------------------ inside

    def _tell(self, request: wire.TrainerRequest) -> None:
        name = wire.request_name(request)
        self._ask(request, lambda m: isinstance(m, Done) and m.request == name)

    def _ask(
        self,
        request: wire.TrainerRequest,
        is_answer: Callable[[wire.ToTrainer], bool],
        *,
        on_wait: Callable[[Waiting], bool] | None = None,
    ) -> Answer:
        """Send until answered, reconnecting to wherever the datapipe is now."""
        name = wire.request_name(request)
        heard = waited = time.monotonic()
        looked_up = float("-inf")
        if self._socket is None:
            self._connect()
            looked_up = heard
        self._send(request)
        while True:
            now = time.monotonic()
            if now - heard > self.silence_s:
                raise RoleError(
                    f"the datapipe at {self._address} has been silent for {now - heard:.0f} s; "
                    f"trainer rank {self.rank} waits for the answer to '{name}'"
                )
            if now - max(heard, looked_up) > SILENT_S:
                looked_up = now
                self._reconnect(request)
            waiting = None
            if (received := self._receive()) is not None:
                heard = now
                message = received[0]
                if is_answer(message):
                    return received
                waiting = message if isinstance(message, Waiting) else None
            elif now - waited > 1.0 and now - heard > 1.0:
                waiting = Waiting(name, f"the datapipe, silent for {now - heard:.1f} s")
            if waiting is not None and waiting.request == name and on_wait is not None:
                waited = now
                if on_wait(waiting):
                    self._send(Finish(wire.STOP_WAITING))

    @staticmethod
    def _is_answer(kind: type) -> Callable[[wire.ToTrainer], bool]:
        return lambda message: isinstance(message, kind)

    def _receive_all(self) -> None:
        while self._receive(block=False) is not None:
            pass

    def _receive(self, *, block: bool = True) -> Answer | None:
        """Return the next message; keeps an evaluation's scores aside.

        Raises:
            InvariantError: it is a refusal.
        """
        socket = self._socket
        if socket is None:
            time.sleep(POLL_MS / 1000)
            return None
        if not socket.poll(POLL_MS if block else 0):
            return None
        frames = socket.recv_multipart()
        message = wire.decode_to_trainer(frames[0])
        if isinstance(message, Refused):
            raise InvariantError(f"the datapipe refused '{message.request}': {message.reason}")
        if isinstance(message, EvalResult) and self._evals.pop(message.eval_id, None):
            self._eval_results.append(message)
        return message, frames[1:]

    def _send(self, message: wire.TrainerRequest) -> None:
        if self._socket is not None:
            with suppress(zmq.Again):  # nobody there: it is sent again after a look-up
                self._socket.send(wire.encode(message), zmq.NOBLOCK)

    def _connect(self) -> None:
        self._address = self._resolve()
        if self._address is not None:
            self._socket = wire.open_socket(self._context, zmq.DEALER)
            self._socket.connect(self._address)

    def _reconnect(self, request: wire.TrainerRequest) -> None:
        """Look the datapipe up again and repeat what it has not answered."""
        before = self._address
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        self._connect()
        if self._address != before:
            logger.info("datapipe moved", address=self._address, before=before)
        self._send(request)
        for other in self._evals.values():
            if other is not request:
                self._send(other)
