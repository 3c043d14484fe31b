"""The loop of rl_loop.py with concurrent sampling and training; new weights interrupt answers.

    python3 examples/async_loop.py

While one batch is trained, the server samples the next two batches. For new weights it pauses,
loads them, and continues each unfinished answer after its last token. Such an answer has tokens of
two versions; the version of each token is recorded.
"""

from __future__ import annotations

import asyncio
import random
import time

import rl_loop
from rl_loop import GROUP_SIZE, SEED, STEPS, arealite

AHEAD = 2
"""Batches that are sampled while one is trained; also the maximum age of a token, in versions."""
ROWS = "llm_server.embedded.max_running_requests=24"
"""The server generates so many answers at a time; the others wait."""


async def loop(session: arealite.Session) -> None:
    """Train and publish one batch after the other; sampling never waits for them."""
    step = 0
    begin = time.perf_counter()
    rng = random.Random(SEED)
    prompts = (rl_loop.draw_prompts(rng) for _ in range(STEPS))
    async for samples in session.batches(prompts, ahead=AHEAD, n=GROUP_SIZE):
        stats = await rl_loop.train(session, samples)
        await session.publish()
        rl_loop.show(step, samples, stats, begin)
        step += 1


if __name__ == "__main__":
    options = {"max_staleness": AHEAD, "launcher.server_args": [ROWS]}
    asyncio.run(rl_loop.main(loop, options))
