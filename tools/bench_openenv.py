"""Measure `arealite serve`: steps per second of 16 sessions with an environment that does nothing.

The server runs in a separate process, the client in this one: once with bare sockets, one per
session, and once with RemoteEnv, as in a rollout worker (each episode opens a socket).

    python tools/bench_openenv.py [--sessions 16] [--seconds 2] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import uvloop

from arealite.api.agent import Agent
from arealite.api.env import EnvConfig, StepEnv, StepResult, envs, make_env
from arealite.api.episode import Action, Seat
from arealite.api.runtime import RuntimeConfig
from arealite.api.task import Task
from arealite.base import log
from tools import figures

ROOT = Path(__file__).resolve().parents[1]
LONG, SHORT = 50, 1
"""Number of steps of an episode."""


@envs.register("bench_steps")
class Steps(StepEnv):
    """Environment that does nothing; the prompt is the number of its steps."""

    async def reset(self, task: Task) -> tuple[Any, Any]:
        return [int(task.prompt)], "begin"

    async def step(self, state: Any, action: Any) -> StepResult:
        state[0] -= 1
        return StepResult(action.text, 1.0, state[0] == 0)


class Instant(Agent):
    """An agent without a model."""

    def __init__(self) -> None:
        super().__init__(None, client=None, tokenizer=None, seat=Seat())  # pyright: ignore
        self.total = 0.0

    async def act(self, observation: Any) -> Action:
        return Action("an answer")

    def reward(self, value: float, **parts: float) -> None:
        self.total += value


@contextmanager
def served() -> Iterator[str]:
    """Run a server during the body; yield its address."""
    command = [sys.executable, "-m", "arealite.cli.main", "serve", "env.type=bench_steps"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    with subprocess.Popen(
        [*command, "imports=[bench_openenv]"], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().removeprefix("serving on ").strip()
        finally:
            process.terminate()


async def by_hand(address: str, sessions: int, seconds: float) -> float:
    """Return the steps per second of bare sockets."""
    reset = json.dumps({"type": "reset", "data": {"task": {"prompt": str(LONG)}}})
    step = json.dumps({"type": "step", "data": {"text": "an answer"}})
    end = time.perf_counter() + seconds

    async def play(socket: aiohttp.ClientWebSocketResponse) -> int:
        steps = 0
        while time.perf_counter() < end:
            await socket.send_str(reset)
            await socket.receive_str()
            for _ in range(LONG):
                await socket.send_str(step)
                said = await socket.receive_str()
            assert '"done":true' in said
            steps += LONG
        return steps

    async with aiohttp.ClientSession() as session:
        sockets = [await session.ws_connect(f"http://{address}/ws") for _ in range(sessions)]
        begin = time.perf_counter()
        steps = await asyncio.gather(*(play(socket) for socket in sockets))
        return sum(steps) / (time.perf_counter() - begin)


async def as_env(config: EnvConfig, args: argparse.Namespace, length: int) -> float:
    """Return the steps per second of episodes whose agents answer at once."""
    env = make_env(None, config)
    await env.setup()
    begin = time.perf_counter()

    async def play() -> int:
        steps = 0
        while time.perf_counter() < begin + args.seconds:
            agent = Instant()
            await env.run(
                Task(task_id="t", prompt=str(length), ground_truth=None, extra_info={}), agent=agent
            )
            assert agent.total == length
            steps += length
        return steps

    steps = await asyncio.gather(*(play() for _ in range(args.sessions)))
    rate = sum(steps) / (time.perf_counter() - begin)
    await env.close()
    return rate


async def bench(args: argparse.Namespace) -> dict[str, float]:
    """Run all measurements alternately; return the median of each metric."""
    runs: dict[str, list[float]] = {}
    with served() as address:
        here = EnvConfig(type="bench_steps")
        there = replace(here, runtime=RuntimeConfig(type="remote", addresses=[address]))
        for _ in range(args.repeats + 1):  # the first round is a warm-up
            rates = {
                "sockets_steps_s": await by_hand(address, args.sessions, args.seconds),
                "remote_env_steps_s": await as_env(there, args, LONG),
                "remote_env_episodes_s": await as_env(there, args, SHORT),
                "in_process_steps_s": await as_env(here, args, LONG),
            }
            for name, rate in rates.items():
                runs.setdefault(name, []).append(rate)
    results = {name: statistics.median(rates[1:]) for name, rates in runs.items()}
    for name, rates in runs.items():
        print(f"{name:24s} {results[name]:10.0f}   ({min(rates[1:]):.0f} to {max(rates[1:]):.0f})")
    return results | {"sessions": args.sessions}


def main() -> None:
    """Print the table and write out/bench/openenv.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    log.setup("bench", "warning")
    results = uvloop.run(bench(args))
    figures.save("openenv.json", results)


if __name__ == "__main__":
    main()
