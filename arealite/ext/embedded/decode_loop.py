"""Runs the decode loop in a thread: each step samples one token for every running request.

The thread is separate from the event loop, which therefore answers HTTP requests while the model
computes. `call` and `call_between_requests` queue commands for the thread. After each step the
thread delivers the generations that ended to the event loop, in one call.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from arealite.base import log
from arealite.ext.embedded.decoder import BaseDecoder
from arealite.ext.embedded.futures import resolve
from arealite.ext.embedded.generation import Generation
from arealite.ext.embedded.served_adapters import LowRankByLayer

logger = log.get(__name__)

T = TypeVar("T")
LoopCommand = Callable[[], None]

CLOSE_S = 30.0
"""Seconds that `close` waits for the running forward pass."""


@dataclass(eq=False, kw_only=True)
class Engine:
    """Owns all requests. Only the engine's thread may access them and the model."""

    decoder: BaseDecoder
    deliver: Callable[[list[Generation], list[Generation]], None]
    """Takes the streamed generations that have new tokens, and the generations that ended."""
    on_crash: Callable[[BaseException], None] = lambda error: None
    num_threads: int = 1

    def __post_init__(self) -> None:
        self.version = "default"
        self.adapter_versions = dict[str, str]()
        """The version of each adapter that requests may name."""
        self.paused: str | None = None
        self.waiting: deque[Generation] = deque()
        self.last_pause_s = 0.0
        self._inbox: list[LoopCommand] = []
        self._wake = threading.Condition()
        self._updates: deque[LoopCommand] = deque()
        """Weight updates: each waits for a pause or the end of all running requests. Meanwhile no
        request is admitted."""
        self._outbox: list[Generation] = []
        self._closing = False
        self._paused_at = time.perf_counter()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def paused_s(self) -> float | None:
        """Seconds since the pause began; None while not paused."""
        if self.paused is None:
            return None
        return round(time.perf_counter() - self._paused_at, 1)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End all requests with their output so far, and then the thread."""

        def closing() -> None:
            self._closing = True
            self.abort(lambda generation: True)

        self._post(closing)
        self._thread.join(timeout=CLOSE_S)

    def call(self, command: Callable[..., T], *args: object) -> Future[T]:
        """Run a method of this class in the engine's thread."""
        future = Future[T]()
        self._post(partial(resolve, future, partial(command, *args)))
        return future

    def call_between_requests(
        self,
        command: Callable[..., T],
        *args: object,
    ) -> Future[T]:
        """Run a method in the engine's thread when paused, or when no request is running."""
        future = Future[T]()
        job = partial(resolve, future, partial(command, *args))
        self._post(partial(self._updates.append, job))
        return future

    # ------------------------------------------------------------ in the engine's thread

    def submit(self, *generations: Generation) -> None:
        """Queue generations; one whose adapter was unloaded meanwhile fails."""
        for generation in generations:
            if generation.adapter and generation.adapter not in self.adapter_versions:
                generation.error = f"The adapter '{generation.adapter}' was unloaded."
                self._outbox.append(generation)
            else:
                self.waiting.append(generation)

    def abort(self, chosen: Callable[[Generation], bool]) -> None:
        """End the chosen generations with their output so far."""
        for generation in filter(chosen, self.decoder.running):
            generation.abort("Aborted")
        self._release_ended()
        still_waiting: deque[Generation] = deque()
        for generation in self.waiting:
            if not chosen(generation):
                still_waiting.append(generation)
                continue
            generation.abort("Abort in waiting queue")
            self._close_span(generation)
            self._outbox.append(generation)
        self.waiting = still_waiting

    def pause(self, mode: str) -> None:
        """Stop generating.

        Args:
            mode: "abort" ends all requests; "retract" drops their KV cache and computes it again
                after the pause; "in_place" keeps the KV cache.
        """
        if self.paused is None:
            self._paused_at = time.perf_counter()
        self.paused = mode
        if mode == "abort":
            self.abort(lambda generation: True)
        if mode == "retract":
            self._let_wait(self.decoder.clear())

    def resume(self) -> None:
        """Continue after a pause; no-op if not paused."""
        if self.paused is not None:
            self.last_pause_s = time.perf_counter() - self._paused_at
        self.paused = None

    def flush(self) -> bool:
        """Drop the KV cache and return True; return False while requests run."""
        if self.decoder.running:
            return False
        self.decoder.clear()
        return True

    def update(
        self,
        stage: Callable[[], LoopCommand],
        version: str | None,
        flush: bool,
    ) -> bool:
        """Load new weights; called through `call_between_requests`.

        Args:
            stage: Checks the weights, and raises if it refuses them. Returns a function that writes
                them and is expected not to fail.
            version: The new version; None keeps the present version.
            flush: Whether to drop the KV cache.

        Returns:
            False if `flush` is set, but the KV cache of the old weights could not be dropped.
        """
        load = stage()
        try:
            load()
        except Exception as error:
            self._closing = True  # the weights may be partly old and partly new
            self.on_crash(error)
            raise
        self.decoder.drop_prefix()
        if version is not None:
            self.relabel(version)
        return not flush or self.flush()

    def relabel(self, version: str) -> None:
        """Set the version of the tokens that are sampled from now on without a named adapter."""
        if version != self.version:
            for generation in (*self.decoder.running, *self.waiting):
                self._close_span(generation)
            self.version = version

    def load_adapter(
        self,
        name: str,
        low_rank_by_layer: LowRankByLayer,
        version: str,
    ) -> None:
        """Load or replace the adapter `name`; requests without it are not interrupted.

        Its running requests continue with new keys and values.
        """
        self._let_wait(self.decoder.remove(lambda generation: generation.adapter == name))
        for generation in self.waiting:
            if generation.adapter == name:
                self._close_span(generation)
        self.decoder.adapters.load(name, low_rank_by_layer)
        self.decoder.drop_prefix()
        self.adapter_versions[name] = version

    def unload_adapter(self, name: str) -> None:
        """Remove the adapter `name`; its requests end with the output they have."""
        self.abort(lambda generation: generation.adapter == name)
        self.decoder.adapters.remove(name)
        self.decoder.drop_prefix()
        self.adapter_versions.pop(name, None)

    def version_of(self, generation: Generation) -> str:
        """Return the version of the tokens that a request gets now."""
        return self.adapter_versions.get(generation.adapter, self.version)

    def _close_span(self, generation: Generation) -> None:
        generation.close_span(self.version_of(generation))

    def _let_wait(self, retracted: list[Generation]) -> None:
        """Let requests that lost their keys and values wait to be computed again, before others."""
        # Sorted by length, because prompts of similar length need the least padding.
        retracted.sort(key=Generation.length_so_far, reverse=True)
        for generation in retracted:
            generation.retractions += 1
        self.waiting.extendleft(retracted)

    def _post(self, command: LoopCommand) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _main(self) -> None:
        torch.set_num_threads(self.num_threads)
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._run_iteration()
        except BaseException as error:
            logger.exception("engine crashed")
            self.on_crash(error)

    def _run_iteration(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._has_work())
            inbox = self._inbox
            self._inbox = []
        for command in inbox:
            command()
        while self._updates and (self.paused or not self.decoder.running):
            self._updates.popleft()()
        if not self.paused and not self._closing:
            self._step()
        grown: list[Generation] = []
        for generation in self.decoder.running:
            if generation.interval and generation.is_event_due:
                self._close_span(generation)
                grown.append(generation)
        if grown or self._outbox:
            ended = self._outbox
            self._outbox = []
            self.deliver(grown, ended)

    def _has_work(self) -> bool:
        if self.paused is not None:
            return False
        return bool(self.decoder.running or self.waiting or self._updates)

    def _step(self) -> None:
        decoder = self.decoder
        try:
            may_admit = not self._updates and len(decoder.running) < decoder.max_rows
            if self.waiting and may_admit:
                decoder.prefill(self.waiting)
                self._release_ended()
            if decoder.running:
                decoder.decode()
                self._release_ended()
        except Exception as error:
            logger.exception("decode step failed", requests=len(decoder.running))
            failed = decoder.clear()
            for generation in failed:
                generation.error = f"{type(error).__name__}: {error}"
            self._outbox += failed

    def _release_ended(self) -> None:
        """Move ended requests to the outbox."""
        ended = self.decoder.remove_ended()
        for generation in ended:
            self._close_span(generation)
        self._outbox += ended
