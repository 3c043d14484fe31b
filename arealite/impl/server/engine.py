"""The decode loop's thread: requests and commands come in, one token a request leaves each step.

A thread of its own, so that HTTP answers while the model computes. Consumes submitted generations
and commands; waits for either, on a condition; unblocked by every public method here. Generations
that ended cross to the event loop in one call a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from arealite.base import log
from arealite.impl.server.decoder import Decoder
from arealite.impl.server.generation import Generation

logger = log.get(__name__)

CLOSE_S = 30.0
"""A forward pass may take this long to end; after that the process ends without it."""


class Engine:
    """Owns all requests; only its own thread touches them and the model."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_threads: int = 1,
        deliver: Callable[[list[Generation]], None],
        on_death: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.decoder = decoder
        self.version = "default"
        self.paused: str | None = None
        self.waiting: deque[Generation] = deque()
        self.last_pause_s = 0.0
        self._num_threads = num_threads
        self._deliver = deliver
        self._on_death = on_death
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._updates: deque[Callable[[], None]] = deque()
        """Each waits for a pause, or for the running requests to end; none is admitted then."""
        self._outbox: list[Generation] = []
        self._closing = False
        self._paused_at = time.perf_counter()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def paused_s(self) -> float | None:
        """Seconds since the pause began; None while not paused."""
        return None if self.paused is None else round(time.perf_counter() - self._paused_at, 1)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Abort everything with what there is, and end the thread."""

        def closing() -> None:
            self._closing = True
            self._abort(lambda generation: True)

        self._post(closing)
        self._thread.join(timeout=CLOSE_S)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue generations."""
        self._post(lambda: self.waiting.extend(generations))

    def abort(self, chosen: Callable[[Generation], bool]) -> None:
        """End the chosen generations with what there is."""
        self._post(lambda: self._abort(chosen))

    def pause(self, mode: str) -> Future[None]:
        """Stop generating: "abort" ends all, "retract" drops their KV, "in_place" keeps it."""
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Go on after a pause; no effect without one."""
        return self._call(self._resume)

    def flush(self) -> Future[bool]:
        """Drop all KV; False, and no effect, while requests run."""
        return self._call(self._flush)

    def update(
        self, stage: Callable[[], Callable[[], None]], *, version: str | None, flush: bool
    ) -> Future[bool]:
        """Change the weights when paused or when the running requests have ended.

        `stage` checks them and may refuse by raising; what it returns writes them, and cannot fail.
        Both run in the engine's thread: a change of thread costs as much as a small model's copy.
        Returns False when `flush` was asked for while requests hold KV of the old weights.
        """
        future, update = Future[bool](), partial(self._update, stage, version, flush)
        self._post(lambda: self._updates.append(partial(settle, future, update)))
        return future

    def relabel(self, version: str) -> Future[None]:
        """Tell another version of the weights from the next token on."""
        return self._call(lambda: self._relabel(version))

    def _call(self, command: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._post(partial(settle, future, command))
        return future

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _main(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._turn()
        except BaseException as error:
            logger.exception("engine died")
            self._on_death(error)

    def _turn(self) -> None:
        with self._wake:
            while not self._inbox and not self._has_work():
                self._wake.wait()
            inbox, self._inbox = self._inbox, []
        for command in inbox:
            command()
        while self._updates and (self.paused or not self.decoder.running):
            self._updates.popleft()()
        if not self.paused and not self._closing:
            self._step()
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._deliver(outbox)

    def _has_work(self) -> bool:
        work = self.decoder.running or self.waiting or self._updates
        return self.paused is None and bool(work)

    def _step(self) -> None:
        decoder = self.decoder
        try:
            if self.waiting and not self._updates and len(decoder.running) < decoder.max_rows:
                decoder.prefill(self.waiting)
                self._let_go()
            if decoder.running:
                decoder.decode()
                self._let_go()
        except Exception as error:
            logger.exception("decode step failed", requests=len(decoder.running))
            failed = decoder.clear()
            for generation in failed:
                generation.error = f"{type(error).__name__}: {error}"
            self._outbox += failed

    def _let_go(self) -> None:
        """Hand ended requests out."""
        ended = self.decoder.remove_ended()
        for generation in ended:
            generation.close_span(self.version)
        self._outbox += ended

    def _abort(self, chosen: Callable[[Generation], bool]) -> None:
        for generation in filter(chosen, self.decoder.running):
            generation.abort("Aborted")
        self._let_go()
        gone = list(filter(chosen, self.waiting))
        self.waiting = deque(g for g in self.waiting if not chosen(g))
        for generation in gone:
            generation.abort("Abort in waiting queue")
            generation.close_span(self.version)
        self._outbox += gone

    def _pause(self, mode: str) -> None:
        if self.paused is None:
            self._paused_at = time.perf_counter()
        self.paused = mode
        if mode == "abort":
            self._abort(lambda generation: True)
        if mode == "retract":
            retracted = self.decoder.clear()
            for generation in retracted:
                generation.retractions += 1
            # Side by side with their like, they are padded least when they are computed again.
            retracted.sort(key=lambda g: len(g.prompt) + len(g.output), reverse=True)
            self.waiting.extendleft(retracted)

    def _resume(self) -> None:
        if self.paused is not None:
            self.last_pause_s = time.perf_counter() - self._paused_at
        self.paused = None

    def _flush(self) -> bool:
        if self.decoder.running:
            return False
        self.decoder.clear()
        return True

    def _update(
        self, stage: Callable[[], Callable[[], None]], version: str | None, flush: bool
    ) -> bool:
        load = stage()
        try:
            load()
        except Exception as error:
            self._closing = True  # checked before, so it failed half way: the weights are mixed
            self._on_death(error)
            raise
        if version is not None:
            self._relabel(version)
        return not flush or self._flush()

    def _relabel(self, version: str) -> None:
        if version != self.version:
            for generation in (*self.decoder.running, *self.waiting):
                generation.close_span(self.version)
            self.version = version


def settle(future: Future[Any], command: Callable[[], Any]) -> None:
    """Run a command and put its outcome into `future`, unless its client went away."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command())
    except Exception as error:  # noqa: BLE001  (crosses to the thread that waits)
        future.set_exception(error)
