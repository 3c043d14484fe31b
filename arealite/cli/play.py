"""`arealite play ENV`: a person sits in an environment, as an agent would; others sit beside.

The same observations, choices and rewards that agents get: the way to see what a task is like.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import fields, is_dataclass, replace
from itertools import chain, islice
from typing import Any, cast

from arealite.api.agent import Agent, AgentFactory, agents
from arealite.api.agent_config import ScriptedConfig
from arealite.api.config import ExperimentConfig
from arealite.api.env import envs
from arealite.api.env_config import EnvConfig
from arealite.api.episode import Action, Seat
from arealite.api.observation import Observation, ToolCall, observe
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.base.registry import unknown
from arealite.cli import configs
from arealite.cli.fold import fold
from arealite.cli.main import first
from arealite.impl.agent.calls import hermes
from arealite.impl.env_client import make_env
from arealite.system.data.dataset import load_tasks
from arealite.system.data.tasks import generate

COLLECTOR = "trainer.ppo.collector."
ABOUT = """\
Play an environment in this terminal. You sit in its first seat, or in those of
--seat; each line that you type is an answer, and the end of the input (Ctrl-D)
ends the game. An option is one of the environment (opening_moves=2,
runtime.type=subprocess), of a seat (seats.o.type=fixed_policy), or any of
train.py's (imports=[my_env]). `arealite envs` lists the environments.
"""
CALL = 'to call one: <tool_call>{"name": …, "arguments": {…}}</tool_call>'


class Left(EpisodeError):
    """The person has closed the input."""

    failure_class = "left"


class Lines:
    """Reads lines of the standard input in a thread, so that the event loop never waits for it."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Held by the seat that asks the person; one seat at a time."""
        self.told = list[str]()
        """What the others did, not shown yet: seats may act at the same time."""
        self._typed = asyncio.Queue[bytes]()
        """Lines that no seat has read yet; an empty one is the end of the input."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read_input, args=(loop,), daemon=True).start()

    def show(self, *texts: str) -> None:
        """Print what the others did, then `texts`."""
        print(fold("\n".join([*self.told, "", *texts])), end="", flush=True)
        self.told.clear()

    async def read(self) -> str:
        """Return the next line without its end.

        Raises:
            Left: there are no more.
        """
        if not (line := await self._typed.get()):
            self._typed.put_nowait(line)  # for the other seats
            raise Left("the input has ended")
        return line.decode(errors="replace").rstrip("\r\n")

    def _read_input(self, loop: asyncio.AbstractEventLoop) -> None:
        # Unbuffered: a lock of sys.stdin would hold up the end of the process.
        with suppress(RuntimeError), open(0, "rb", buffering=0, closefd=False) as typed:
            for line in chain(iter(typed.readline, b""), [b""]):
                loop.call_soon_threadsafe(self._typed.put_nowait, line)


class Player(Agent):
    """A seat that asks a person, or has another agent answer and tells what it says."""

    trainable = False
    lines: Lines
    other: Agent | None = None
    total = 0.0
    known: tuple[dict[str, Any], ...] = ()
    """Tools that were shown already."""

    async def act(self, observation: Any) -> Action:
        """Return a line of the person's, or what the other agent does.

        A scripted one cannot write: where there is nothing to choose among, the person has to.
        """
        seen, other = observe(observation), self.other
        can_write = getattr(getattr(other, "config", None), "policy", "answers") == "answers"
        if other is not None and (seen.choices or can_write):
            action = await other.act(observation)
            self.lines.told.append(f"[{self.seat.name}] {action.text}")
            return action
        async with self.lines.turn:
            self.lines.show(show(seen, known=self.known), f"{self.seat.name}> ")
            self.known = seen.tools
            text = await self.lines.read()
        calls = hermes(text)[1] if seen.tools else []
        return Action(text, calls=tuple(ToolCall(f"call_{n}", *c) for n, c in enumerate(calls)))

    def reward(self, value: float, **parts: float) -> None:
        """Add up what is told at the end."""
        super().reward(value, **parts)
        self.total += value


def main(argv: Sequence[str]) -> int:
    """Play one episode; return 1 where it failed."""
    options = parse(argv)
    words = [whole(word, options.env) for word in options.words]
    config = configs.load(ExperimentConfig, [], [f"{COLLECTOR}env.type={options.env}", *words])
    envs.check(options.env)
    try:
        asyncio.run(play(config, options))
    except (EpisodeError, ExceptionGroup) as raised:
        error = first(raised)
        if not isinstance(error, EpisodeError):
            raise
        print("\nyou left" if isinstance(error, Left) else f"\nno reward: {error}")
        return 0 if isinstance(error, Left) else 1
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="arealite play",
        description=fold(ABOUT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("env", metavar="ENV", help="its name")
    parser.add_argument("--seat", action="append", help="yours; several times, or `all`")
    parser.add_argument(
        "--opponent", default="scripted", help="agent of the other seats; scripted: plays at random"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the task, and of the opponent")
    parser.add_argument("--task", metavar="FILE", help="tasks, JSONL or Parquet; default: new ones")
    parser.add_argument("--row", type=int, default=0, help="which of the tasks, from 0")
    parser.add_argument("words", nargs="*", metavar="key=value", help="options")
    return parser.parse_intermixed_args(argv)


def whole(word: str, env: str) -> str:
    """Return an option with its whole key, as train.py takes it."""
    head, dot, _ = word.split("=", 1)[0].partition(".")
    if dot and head in (env, *names_of(EnvConfig)):
        return f"{COLLECTOR}env.{word}"
    if dot and head == "seats":
        return f"{COLLECTOR}{word}"
    is_own = head in names_of(getattr(EnvConfig(), env, None) or envs.configs.get(env))
    if head in names_of(ExperimentConfig) and not is_own:
        return word
    return f"{COLLECTOR}env.{env}.{word}"


def names_of(schema: Any) -> list[str]:
    """Return the names of a config's options."""
    return [item.name for item in fields(schema)] if is_dataclass(schema) else []


async def play(config: ExperimentConfig, options: argparse.Namespace) -> None:
    """Play one episode, and tell its rewards."""
    collector = config.trainer.ppo.collector
    task = find_task(collector.env, options)
    env = make_env(config, collector.env)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(env.close)
        await env.setup()
        players = await seat(env.seats, config, options, stack)
        await env.run(task, **players)
    lines = next(iter(players.values())).lines
    lines.show("")
    for name, player in players.items():
        parts = ", ".join(f"{part}={value:g}" for part, value in player.record.reward_parts.items())
        print(f"{name}: reward {player.total:g}" + (f" ({parts})" if parts else ""))


def find_task(env: EnvConfig, options: argparse.Namespace) -> Task:
    """Return the task to be played.

    Raises:
        UserError: there is none of that number, or the environment makes none.
    """
    row, file = options.row, options.task
    drawn: Iterable[Task] = (
        load_tasks(file, "play") if file else generate(env, "play", options.seed)
    )
    if row < 0 or not (found := [*islice(drawn, row, row + 1)]):
        raise UserError(f"--row {row}: {file or env.type} has no such row; the first one is 0.")
    return found[0]


async def seat(
    names: Sequence[str],
    config: ExperimentConfig,
    options: argparse.Namespace,
    stack: AsyncExitStack,
) -> dict[str, Player]:
    """Return who sits where; `stack` ends what the others share.

    Raises:
        UserError: there is no such seat, or agent, or it needs the policy of a run.
    """
    collector, lines = config.trainer.ppo.collector, Lines()
    nothing = cast(Any, object())  # these agents have no use for the run's client and tokenizer
    factory = AgentFactory(config, collector.client, client=nothing, tokenizer=nothing)
    mine = [*names] if options.seat == ["all"] else options.seat or names[:1]
    if strange := {*mine, *collector.seats} - {*names}:
        raise UserError(unknown("seat", min(strange), names))
    scripted = ScriptedConfig(policy="random", seed=options.seed)
    stand_in = replace(collector.agent, type=options.opponent, scripted=scripted)
    players = dict[str, Player]()
    for name in names:
        about = Seat(name, group_id="play", episode_id="play/0")
        players[name] = player = Player(None, client=nothing, tokenizer=nothing, seat=about)
        player.lines = lines
        if name not in mine:
            who = collector.seats.get(name, stand_in)
            if agents.get(who.type).trainable:
                raise UserError(
                    f"seat '{name}': agent.type={who.type} generates with the policy of a run. Use "
                    f"seats.{name}.type=fixed_policy and its options, or scripted."
                )
            await factory.share(who, stack)
            player.other = factory.make_agent(who, about)
    return players


def show(seen: Observation, *, known: Sequence[dict[str, Any]] = ()) -> str:
    """Return an observation as a person reads it, with tools that are not known yet."""
    content = seen.content
    if not isinstance(content, str):
        content = "\n".join(f"{each.get('role')}: {each.get('content')}" for each in content)
    tools = [f"tool: {t.get('function', t)}" for t in seen.tools if t not in known]
    choices = f"choices: {', '.join(seen.choices)}" if seen.choices else ""
    lines = [content.rstrip("\n"), *tools, CALL if tools else "", choices]
    return "\n".join(filter(None, lines))
