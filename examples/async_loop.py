"""rl_loop.py with sampling beside training, interrupted by new weights.

    python3 examples/async_loop.py

The sampler works in a thread and has the answers to the next two batches under way while one is
trained. New weights do not wait for them: the sampler pauses, loads, and continues each answer
where it was. Such an answer has tokens of two versions, and each token knows its own.
"""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from queue import SimpleQueue

import rl_loop
from rl_loop import FSDPEngine, Generation, Sample, Sampler

from arealite.impl.server.engine import Engine

AHEAD = 2
"""Batches under way beside the one that is trained: no token is older than this, in versions."""
ROWS = 24
"""Answers that are generated at once; the others wait."""


class AsyncSampler(Sampler):
    """Generates in a thread of its own; requests come and go between two tokens."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path, max_rows=ROWS)
        self.ended: SimpleQueue[list[Generation]] = SimpleQueue()
        self.engine = Engine(self.decoder, deliver=self.ended.put)
        self.engine.version = "0"
        self.engine.start()
        self.delivered: set[Generation] = set()
        self.batches: deque[list[Generation]] = deque()

    def submit(self, tasks: list[str]) -> list[Generation]:
        """Start answers, and return without waiting for them."""
        requests = [self.request(digits) for digits in tasks]
        self.engine.submit(requests)
        return requests

    def collect(self, requests: list[Generation]) -> list[Sample]:
        """Wait for answers that were started."""
        while not self.delivered.issuperset(requests):
            self.delivered.update(self.ended.get())
        self.delivered.difference_update(requests)
        return [self.score(request) for request in requests]

    def sample(self, tasks: list[str]) -> list[Sample]:
        """Start answers and wait for them."""
        return self.collect(self.submit(tasks))

    def next_batch(self, rng: random.Random) -> list[Sample]:
        """Keep AHEAD further batches under way; wait for the oldest one."""
        while len(self.batches) <= AHEAD:
            self.batches.append(self.submit(rl_loop.draw_tasks(rng)))
        return self.collect(self.batches.popleft())

    def load(self, engine: FSDPEngine, version: int) -> None:
        """Load new weights between two tokens; unfinished answers continue under them."""
        self.engine.pause("retract").result()  # drops keys and values, keeps the sampled tokens
        copy = partial(self.model.load_state_dict, dict(engine.stream_weights()))
        self.engine.update(lambda: copy, version=str(version), flush=True).result()
        self.engine.resume()
        self.version = version


if __name__ == "__main__":
    rl_loop.main(AsyncSampler)
