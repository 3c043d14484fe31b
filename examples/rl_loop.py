"""The whole loop of reinforcement learning, written with the parts of AReaLite.

    python3 examples/rl_loop.py

A tiny model learns to sort six digits: 30 % of its answers are right at the start, more than 70 %
at the end, in about a minute on two CPU cores. A server samples, this process trains.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where arealite is not installed

import arealite
from arealite.ext.demo.sorting import answer, draw, held_out, make_kit, question

Loop = Callable[[arealite.Session], Awaitable[None]]
SEED = 1
STEPS, GROUPS, GROUP_SIZE, UPDATES = 80, 64, 8, 2
"""Number of batches; tasks per batch; answers per task; optimizer steps per batch."""
OVERRIDES = {
    "seed": SEED,
    "lr": 4e-4,
    "total_steps": STEPS,
    "updates": UPDATES,
    "optimizer.schedule": "linear",
    "advantage.type": "dr_grpo",
    "loss.eps_high": 0.28,
    "collector.sampling.max_new_tokens": 8,
}


def draw_prompts(rng: random.Random) -> list[str]:
    """Draw the prompts of one batch, such as `531426=`; none of them is held out."""
    return [question(digits) for digits in draw(rng, GROUPS, without=held_out(SEED))]


def reward(sample: arealite.Sample) -> float:
    """Return 1 if an answer has the digits of its prompt in order, else 0."""
    digits = str(sample.prompt).removesuffix("=")
    return 1.0 if sample.text == answer(digits) else 0.0


async def train(session: arealite.Session, samples: list[arealite.Sample]) -> dict[str, float]:
    """Apply the optimizer steps of one batch; return the statistics of the last step."""
    rows = session.rows(samples, [reward(sample) for sample in samples])
    # The loss clips the ratio to the probabilities before the first update.
    session.forward(rows, field="prox_logprobs")
    for part in range(UPDATES):
        stats = session.forward_backward(rows[part::UPDATES], loss="ppo")
        session.optim_step()
    return await stats


def show(step: int, samples: list[arealite.Sample], stats: dict[str, float], begin: float) -> None:
    """Print mean reward, age of the oldest token, and number of answers with two versions."""
    mean = sum(map(reward, samples)) / len(samples)
    age = step - min(min(sample.versions) for sample in samples)
    interrupted = sum(len(set(sample.versions)) > 1 for sample in samples)
    line = f"step {step:2d}  reward {mean:.3f}  staleness {age}  interrupted {interrupted:3d}"
    seconds = time.perf_counter() - begin
    print(f"{line}  entropy {stats['entropy']:.2f}  {seconds:3.0f} s", flush=True)


async def accuracy(session: arealite.Session) -> float:
    """Return the share of right answers to held-out tasks at temperature 1."""
    samples = await session.sample([question(digits) for digits in held_out(SEED)])
    return sum(map(reward, samples)) / len(samples)


async def loop(session: arealite.Session) -> None:
    """Sample, train and publish in turns."""
    rng, begin = random.Random(SEED), time.perf_counter()
    for step in range(STEPS):
        samples = await session.sample(draw_prompts(rng), n=GROUP_SIZE)
        stats = await train(session, samples)
        await session.publish()
        show(step, samples, stats, begin)


async def main(run: Loop, options: dict[str, object]) -> None:
    """Start a server and a session; measure the model before and after `run`."""
    about = sys.modules["__main__"].__doc__
    ArgumentParser(description=about, formatter_class=RawTextHelpFormatter).parse_args()
    model = make_kit(Path("runs/examples/kits/sorting"), SEED) / "model"
    async with arealite.session(model, overrides=OVERRIDES | options) as session:
        print(f"right answers before training: {await accuracy(session):.3f}")
        await run(session)
        print(f"right answers after training: {await accuracy(session):.3f}")


if __name__ == "__main__":
    asyncio.run(main(loop, {}))
