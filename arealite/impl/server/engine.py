"""The decode loop: one token for each request there is, step by step, in a thread of its own.

Written here and not taken from transformers' continuous batching, because on a CPU that builds a
mask over all pairs of requests; here every request has a row of its own (see `cache.py`).

Consumes submitted generations and commands. Waits for either, on a condition. Unblocked by
`submit`, `abort` and `_call`; results cross to the event loop in one call a step.

Shape letters: B = rows of a batch, L = padded prompt length, T = positions read, V = vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from arealite.base import log
from arealite.impl.server.cache import SlotCache
from arealite.impl.server.generation import Generation
from arealite.impl.server.sampling import Settings, ban_stops, draw, settings_of

logger = log.get(__name__)

PREFILL_TOKENS = 8192
"""Padded prompt tokens of one forward pass; a longer prompt goes alone."""
WIDTH_BLOCK = 16
"""Attention reads a multiple of this many positions."""


class Engine:
    """Owns the model, its cache and all requests; only its own thread touches them."""

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int,
        seed: int = 1,
        num_threads: int = 1,
        deliver: Callable[[list[Generation]], None],
        on_death: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.model = model
        self.device = str(next(model.parameters()).device)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.max_rows = max_rows
        self.version = "default"
        self.paused: str | None = None
        self.running: list[Generation] = []
        """Row r of the cache belongs to running[r]."""
        self.waiting: deque[Generation] = deque()
        self.stats: dict[str, float] = {"tokens": 0, "steps": 0, "updates": 0}
        """Counters, and the seconds of the last weight update; read by /server_info."""
        self._num_threads = num_threads
        self._deliver = deliver
        self._on_death = on_death
        self._cache = SlotCache(model.config.get_text_config().num_hidden_layers)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._updates: deque[Callable[[], None]] = deque()
        self._held: list[Generation] = []
        """Arrived while a weight update waits for the running ones."""
        self._outbox: list[Generation] = []
        self._closing = False
        self._paused_at = 0.0
        self._settings: Settings | None = None
        self._tokens_B = torch.empty(0, dtype=torch.long)
        self._lengths_B = torch.empty(0, dtype=torch.long)
        self._longest = 0
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # ------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Abort everything with what there is, and end the thread."""

        def closing() -> None:
            self._closing = True
            self._abort(lambda generation: True)

        self._post(closing)
        self._thread.join()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue generations."""
        self._post(lambda: (self._held if self._updates else self.waiting).extend(generations))

    def abort(self, rid: str | None) -> None:
        """End the generations whose id starts with `rid` (None: all) with what there is."""
        self._post(lambda: self._abort(lambda g: rid is None or g.rid.startswith(rid)))

    def abort_these(self, generations: Sequence[Generation]) -> None:
        """End exactly these generations: nobody waits for them any more."""
        gone = set(generations)
        self._post(lambda: self._abort(lambda g: g in gone))

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
        self, load: Callable[[], None], *, version: str | None, flush: bool, abort_all: bool
    ) -> Future[bool]:
        """Change the weights by `load` when paused or when the present requests have ended.

        Returns False when `flush` was asked for while requests hold KV of the old weights.
        """
        future: Future[bool] = Future()

        def ask() -> None:
            if abort_all:
                self._abort(lambda generation: True)
            self._updates.append(_settling(future, lambda: self._update(load, version, flush)))

        self._post(ask)
        return future

    def _call(self, command: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._post(_settling(future, command))
        return future

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # ------------------------------------------------------------ the thread

    def _main(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._turn()
        except BaseException as error:  # the owner decides; the process ends
            logger.exception("engine died")
            self._on_death(error)

    def _turn(self) -> None:
        with self._wake:
            while not self._inbox and not self._has_work():
                self._wake.wait()
            inbox, self._inbox = self._inbox, []
        for command in inbox:
            command()
        while self._updates and (self.paused or not (self.running or self.waiting)):
            self._updates.popleft()()
        if not self._updates and self._held:
            self.waiting.extend(self._held)
            self._held.clear()
        if not self.paused and not self._closing:
            self._step()
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._deliver(outbox)

    def _has_work(self) -> bool:
        return self.paused is None and bool(
            self.running or self.waiting or self._held or self._updates
        )

    def _step(self) -> None:
        try:
            if self.waiting and len(self.running) < self.max_rows:
                self._prefill()
            if self.running:
                self._decode()
        except Exception as error:  # a failed batch is answered, the loop goes on
            logger.exception("decode step failed", requests=len(self.running))
            for generation in self.running:
                generation.error = f"{type(error).__name__}: {error}"
            self._outbox += self.running
            self.running = []
            self._cache.drop()
            self._settings = None

    # ------------------------------------------------------------ forward passes

    def _prefill(self) -> None:
        """Compute the prompts of as many waiting requests as fit; equal prompts once."""
        prompts, fresh = self._admit()
        first, lengths = len(self.running), [len(prompt) for prompt in prompts]
        longest = max(lengths)
        self.running += [generation for generation, _ in fresh]
        self._settings = None
        self._cache.reserve(max(len(self.running), first + len(prompts)), longest + 1)
        self._cache.start_prefill(first)
        tokens_BL = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_BL[row, : len(prompt)] = torch.tensor(prompt)
        positions = sorted({length - 1 for length in lengths})
        whole = fresh[0][0].wants_prompt
        causal_LL = torch.ones(longest, longest, dtype=torch.bool, device=self.device).tril()
        logits = self.model(
            input_ids=tokens_BL.to(self.device),
            attention_mask=causal_LL[None, None],
            position_ids=torch.arange(longest, device=self.device).expand(len(prompts), -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if whole else torch.tensor(positions, device=self.device),
        ).logits
        index = {position: position if whole else i for i, position in enumerate(positions)}
        sources = [source for _, source in fresh]
        last = [index[lengths[source] - 1] for source in sources]
        if whole:
            self._note_prompt(fresh[0][0], logits[0])
        self._spread(first, sources, longest)
        generations = self.running[first:]
        settings = settings_of(generations, vocab_size=self.vocab_size, device=self.device)
        self._accept(generations, self._draw(logits[sources, last], settings, generations))

    def _admit(self) -> tuple[list[tuple[int, ...]], list[tuple[Generation, int]]]:
        """Take waiting requests: the distinct prompts, and (request, index of its prompt)."""
        rows: dict[tuple[int, ...], int] = {}
        fresh: list[tuple[Generation, int]] = []
        longest = 0
        while self.waiting and len(self.running) + len(fresh) < self.max_rows:
            generation = self.waiting[0]
            prompt = (*generation.prompt, *generation.output)
            longest = max(longest, len(prompt))
            if fresh and (generation.wants_prompt or fresh[0][0].wants_prompt):
                break  # its logits are needed at every position: it goes alone
            if rows and prompt not in rows and (len(rows) + 1) * longest > PREFILL_TOKENS:
                break
            if prompt in rows:
                generation.cached_tokens = len(prompt) - 1
            fresh.append((self.waiting.popleft(), rows.setdefault(prompt, len(rows))))
        return list(rows), fresh

    def _spread(self, first: int, sources: Sequence[int], length: int) -> None:
        """Give every fresh request a row: prompt i was computed in row first + i."""
        wanted = [(first + source, first + row) for row, source in enumerate(sources)]
        moves = [(source, target) for source, target in wanted if source != target]
        self._cache.copy_rows([s for s, _ in moves], [t for _, t in moves], length)

    def _note_prompt(self, generation: Generation, logits_LV: torch.Tensor) -> None:
        """Keep the log-probabilities of the prompt's own tokens, from `logprob_start` on."""
        prompt = torch.tensor(generation.prompt[1:], device=self.device)
        logprobs = torch.log_softmax(logits_LV[: len(prompt)].float(), dim=-1)
        picked = logprobs.gather(-1, prompt[:, None])[:, 0]
        generation.input_logprobs = [None, *picked.tolist()][generation.logprob_start :]

    def _decode(self) -> None:
        """Compute one token of every running request."""
        count = len(self.running)
        if self._settings is None:
            self._rebuild()
        assert self._settings is not None
        width = -(-(self._longest + 1) // WIDTH_BLOCK) * WIDTH_BLOCK
        self._cache.reserve(count, width)
        self._cache.start_decode(self._rows_B, self._lengths_B, width)
        hidden_BT = torch.arange(width, device=self.device) > self._lengths_B[:, None]
        mask_BT = torch.zeros(count, width, dtype=self.model.dtype, device=self.device)
        mask_BT.masked_fill_(hidden_BT, -torch.inf)
        logits = self.model(
            input_ids=self._tokens_B[:, None],
            attention_mask=mask_BT[:, None, None],
            position_ids=self._lengths_B[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        tokens_B, logprobs_B = self._draw(logits[:, -1], self._settings, self.running)
        self._tokens_B = tokens_B
        self._lengths_B = self._lengths_B + 1
        self._longest += 1
        self.stats["steps"] += 1
        self._accept(self.running, (tokens_B, logprobs_B))

    def _rebuild(self) -> None:
        """Make the batch's tensors after requests came or went."""
        lengths = [len(g.prompt) + len(g.output) - 1 for g in self.running]
        self._longest = max(lengths)
        self._lengths_B = torch.tensor(lengths, device=self.device)
        self._tokens_B = torch.tensor([g.output[-1] for g in self.running], device=self.device)
        self._rows_B = torch.arange(len(self.running), device=self.device)
        self._settings = settings_of(self.running, vocab_size=self.vocab_size, device=self.device)

    def _draw(
        self, logits_BV: torch.Tensor, settings: Settings, generations: Sequence[Generation]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if settings.may_ban:
            ban_stops(logits_BV, generations)
        return draw(logits_BV, settings, self._generator)

    def _accept(
        self, generations: Sequence[Generation], drawn: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Hand the drawn tokens to their generations, and let the finished ones go."""
        tokens, logprobs = drawn[0].tolist(), drawn[1].tolist()
        ended = False
        for generation, token, logprob in zip(generations, tokens, logprobs, strict=True):
            if generation.append(token, logprob):
                ended = True
            elif generation.stream:
                self._outbox.append(generation)
        self.stats["tokens"] += len(tokens)
        if ended:
            self._compact()

    # ------------------------------------------------------------ requests leave

    def _compact(self) -> None:
        """Let ended requests go; rows from the end move into the holes."""
        alive = [row for row, generation in enumerate(self.running) if not generation.ended]
        for generation in self.running:
            if generation.ended:
                generation.close_span(self.version)
                self._outbox.append(generation)
        count = len(alive)
        sources = [row for row in alive if row >= count]
        holes = sorted(set(range(count)) - set(alive))
        if sources:
            length = max(len(g.prompt) + len(g.output) for g in self.running)
            self._cache.copy_rows(sources, holes, length)
        order = list(range(count))
        for source, hole in zip(sources, holes, strict=True):
            order[hole] = source
        self.running = [self.running[row] for row in order]
        self._settings = None

    def _abort(self, chosen: Callable[[Generation], bool]) -> None:
        for generation in filter(chosen, self.running):
            generation.abort("Aborted")
        self._compact()
        for queue in (self.waiting, self._held):
            everyone = list(queue)
            queue.clear()
            for generation in everyone:
                if not chosen(generation):
                    queue.append(generation)
                    continue
                generation.abort("Abort in waiting queue")
                generation.close_span(self.version)
                self._outbox.append(generation)

    # ------------------------------------------------------------ pauses and weights

    def _pause(self, mode: str) -> None:
        if self.paused is None:
            self._paused_at = time.perf_counter()
        self.paused = mode
        if mode == "abort":
            self._abort(lambda generation: True)
        if mode == "retract":
            for generation in self.running:
                generation.retractions += 1
            self.waiting.extendleft(reversed(self.running))
            self.running = []
            self._settings = None

    def _resume(self) -> None:
        if self.paused is not None:
            self.stats["last_pause_s"] = time.perf_counter() - self._paused_at
        self.paused = None

    def _flush(self) -> bool:
        if self.running:
            return False
        self._cache.drop()
        return True

    def _update(self, load: Callable[[], None], version: str | None, flush: bool) -> bool:
        started = time.perf_counter()
        try:
            load()
        except Exception as error:
            self._closing = True  # checked before, so it failed half way: the weights are mixed
            self._on_death(error)
            raise
        self.stats["last_load_s"] = time.perf_counter() - started
        self.stats["updates"] += 1
        if version is not None and version != self.version:
            for generation in (*self.running, *self.waiting, *self._held):
                generation.close_span(self.version)
            self.version = version
        return not flush or self._flush()


def _settling(future: Future[Any], command: Callable[[], Any]) -> Callable[[], None]:
    """Return `command` with its outcome put into `future`."""

    def run() -> None:
        try:
            future.set_result(command())
        except Exception as error:  # noqa: BLE001  (crosses to the thread that waits)
            future.set_exception(error)

    return run
