"""Measure the episodes per second of one rollout worker with a policy that answers at once.

There is no HTTP and no model, so the time is that of environment, agent and collector.

    python tools/bench_episodes.py [--seconds 2] [--rounds 5] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from arealite.api.agent import Agent  # noqa: E402
from arealite.api.collector_config import CollectorConfig  # noqa: E402
from arealite.api.env import (  # noqa: E402
    Env,
    EnvConfig,
    envs,
)
from arealite.api.experiment_config import ExperimentConfig  # noqa: E402
from arealite.api.llm import LLMClient, LLMRequest, LLMResponse, SamplingConfig  # noqa: E402
from arealite.api.rollout_messages import Lease  # noqa: E402
from arealite.api.task import Task  # noqa: E402
from arealite.api.trainer import PPOConfig, TrainerConfig  # noqa: E402
from arealite.ext.demo.tiny_model import PRINTABLE, make_tokenizer  # noqa: E402
from arealite.impl.rollout.collector import Collector  # noqa: E402
from tools import figures  # noqa: E402

LANES, GROUP, WARM = 64, 8, 4000
BOARD = 18
"""Number of characters of a tic-tac-toe board, at the end of a prompt."""
TOKENIZER = make_tokenizer(PRINTABLE, context=2048)
DIGITS = {TOKENIZER.convert_tokens_to_ids(digit) for digit in "123456789"}
EOS = TOKENIZER.eos_token_id
GOALS = {"single_turn": 5000, "tic_tac_toe": 2000}
"""Required episodes per second."""


@envs.register("single_turn")
class SingleTurn(Env):
    """Environment of one answer, which has reward 1."""

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reward every answer with 1."""
        await agents["agent"].act(task.prompt)
        agents["agent"].reward(1.0)


class InstantClient(LLMClient):
    """Policy that answers with a free square of the last board, or with five letters."""

    def __init__(self) -> None:
        self.choice = random.Random(1).choice
        self.turns = 0

    async def generate(self, request: LLMRequest) -> LLMResponse:
        """Return an answer at once."""
        self.turns += 1
        free = [token for token in request.input_ids[-BOARD:] if token in DIGITS]
        ids = [self.choice(free), EOS] if free else [10, 11, 12, 13, EOS]
        count = len(ids)
        return LLMResponse(
            output_ids=ids, logprobs=[-0.5] * count, versions=[1] * count, stop_reason="stop"
        )


def collector(name: str) -> Collector:
    """Return a collector around one environment and the instant policy."""
    own = CollectorConfig(env=EnvConfig(type=name), sampling=SamplingConfig(max_new_tokens=16))
    config = ExperimentConfig(trainer=TrainerConfig(ppo=PPOConfig(collector=own)))
    return Collector(config, InstantClient(), TOKENIZER)


async def play(
    made: Collector, task: Callable[[int], Task], seconds: float, *, least: int = 0
) -> dict[str, float]:
    """Play for some seconds and a minimum of episodes; return episodes per second of wall time and
    of CPU time."""
    numbers, client, done = iter(range(sys.maxsize)), made._agents.client, 0
    assert isinstance(client, InstantClient)
    begin, cpu, turns = time.perf_counter(), time.process_time(), client.turns

    async def lane() -> None:
        nonlocal done
        for number in numbers:
            group, member = divmod(number, GROUP)
            lease = Lease(
                lease_id=f"l{group}",
                group_id=f"g{group}",
                split="train",
                task=task(group),
                members=[member],
                version=0,
            )
            episode, payloads = await made.run(lease, member)
            assert episode.failure is None, episode.failure
            assert payloads
            done += 1
            if done >= least and time.perf_counter() - begin > seconds:
                return
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(LANES):
            tasks.create_task(lane())
    return {
        "per_s": done / (time.perf_counter() - begin),
        "per_cpu_s": done / (time.process_time() - cpu),
        "turns": (client.turns - turns) / done,
    }


def question(group: int) -> Task:
    """Return a task that no other group has."""
    return Task(
        task_id=f"train-{group}",
        prompt=f"What is {group} + 1? Think it over.",
        ground_truth=None,
        extra_info={},
    )


def game(group: int) -> Task:
    """Return a task of a game."""
    return Task(task_id=f"train-{group}", prompt="tic-tac-toe", ground_truth=None, extra_info={})


async def bench(options: argparse.Namespace) -> dict[str, float]:
    """Play both alternately; return medians."""
    gc.freeze()  # the rollout role sets this and the threshold, too
    gc.set_threshold(50_000)
    found: dict[str, list[float]] = {}
    made = {"single_turn": question, "tic_tac_toe": game}
    collectors = {name: collector(name) for name in made}
    profiler = cProfile.Profile()
    for number in range(options.rounds + 1):
        for name, task in made.items():
            if options.profile == name and number:
                profiler.enable()
            seconds, least = (options.seconds, 0) if number else (0.0, WARM)
            result = await play(collectors[name], task, seconds, least=least)
            profiler.disable()
            for key, value in result.items() if number else ():
                found.setdefault(f"{name}_{key}", []).append(value)
    if options.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Measure, print a table, and write out/bench/episodes.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", choices=GOALS)
    options = parser.parse_args()
    found = uvloop.run(bench(options))
    for name, value in found.items():
        goal = GOALS.get(name.removesuffix("_per_s"))
        print(f"{name:24} {value:10.1f}" + (f"   goal {goal}" if goal else ""))
    figures.save("episodes.json", found)


if __name__ == "__main__":
    main()
