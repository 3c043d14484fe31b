"""The loop of rl_loop.py with concurrent sampling and training; new weights interrupt answers.

    python3 examples/async_loop.py

The sampler runs in a thread. While one batch is trained, it samples the next two batches. For new
weights it pauses, loads them, and continues each unfinished answer after its last token. Such an
answer has tokens of two versions; the version of each token is recorded.
"""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from queue import SimpleQueue

import rl_loop
from rl_loop import FSDPEngine, Generation, Sample, Sampler

from arealite.ext.embedded.decode_loop import Engine

AHEAD = 2
"""Batches that are sampled while one is trained; also the maximum age of a token, in versions."""
ROWS = 24
"""Maximum number of answers that are generated concurrently; the others wait."""


class AsyncSampler(Sampler):
    """Generates in a separate thread; requests start and end between two tokens."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path, max_rows=ROWS)
        self.ended: SimpleQueue[list[Generation]] = SimpleQueue()
        self.engine = Engine(decoder=self.decoder, deliver=lambda _, ended: self.ended.put(ended))
        self.engine.version = "0"
        self.engine.start()
        self.delivered: set[Generation] = set()
        self.batches: deque[list[Generation]] = deque()

    def submit(self, tasks: list[str]) -> list[Generation]:
        """Submit the tasks; return their requests without waiting."""
        requests = [self.request(digits) for digits in tasks]
        self.engine.call(self.engine.submit, *requests)
        return requests

    def collect(self, requests: list[Generation]) -> list[Sample]:
        """Wait for the answers of submitted requests."""
        while not self.delivered.issuperset(requests):
            self.delivered.update(self.ended.get())
        self.delivered.difference_update(requests)
        return [self.score(request) for request in requests]

    def sample(self, tasks: list[str]) -> list[Sample]:
        """Submit the tasks and wait for their answers."""
        return self.collect(self.submit(tasks))

    def next_batch(self, rng: random.Random) -> list[Sample]:
        """Submit tasks until AHEAD further batches are in flight; wait for the oldest batch."""
        while len(self.batches) <= AHEAD:
            self.batches.append(self.submit(rl_loop.draw_tasks(rng)))
        return self.collect(self.batches.popleft())

    def load(self, engine: FSDPEngine, version: int) -> None:
        """Load new weights between two tokens; unfinished answers continue under them."""
        # Drops keys and values, and keeps the sampled tokens.
        self.engine.call(self.engine.pause, "retract").result()
        copy = partial(self.model.load_state_dict, dict(engine.stream_weights()))
        update = self.engine.update
        self.engine.call_between_requests(update, lambda: copy, str(version), True).result()
        self.engine.call(self.engine.resume)
        self.version = version


if __name__ == "__main__":
    rl_loop.main(AsyncSampler)
