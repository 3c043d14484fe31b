"""Play an environment in this terminal. You play its first seat, or those of
--seat. Each line that you type is an answer. The end of the input (Ctrl-D) ends
the game. Options are those of the environment (opening_moves=2,
runtime.type=subprocess), of a seat (seats.o.type=fixed_policy), or of `arealite train`
(imports=[my_env]). `arealite envs` lists the environments.
"""

import asyncio
import threading
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any, cast

from arealite.api.agent import Agent, AgentFactory, agents
from arealite.api.collector_config import AgentConfig
from arealite.api.env import EnvConfig, envs, make_env
from arealite.api.episode import Action, Seat
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.observation import Observation, observe
from arealite.api.task import Task
from arealite.base.config_tree import field_names
from arealite.base.errors import ArealiteError, EpisodeError, UserError, first_of
from arealite.base.printable import fold
from arealite.base.registry import unknown
from arealite.cli import configs
from arealite.ext.agents.config import ScriptedConfig
from arealite.ext.gateway.families import HERMES
from arealite.ext.gateway.parser import read_calls
from arealite.system.data.dataset import load_tasks
from arealite.system.data.tasks import generate, reads_columns

COLLECTOR = "trainer.ppo.collector."
CALL = 'to call a tool: <tool_call>{"name": …, "arguments": {…}}</tool_call>'


class InputEnded(EpisodeError, failure_class="left"):
    """The person has closed the input."""


class Lines:
    """Reads lines of stdin in a thread, so that the event loop is never blocked."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Held by the seat that prompts the person."""
        self.actions = list[str]()
        """Actions of other seats that are not printed yet; seats may act at the same time."""
        self._typed = asyncio.Queue[bytes]()
        """Lines that no seat has read yet; an empty line is the end of the input."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read_input, args=(loop,), daemon=True).start()

    def show(self, *texts: str) -> None:
        """Print the actions of other seats, then `texts`."""
        print(fold("\n".join([*self.actions, "", *texts])), end="", flush=True)
        self.actions.clear()

    async def read(self) -> str:
        """Return the next line without its line end.

        Raises:
            InputEnded: There are no more lines.
        """
        line = await self._typed.get()
        if not line:
            self._typed.put_nowait(line)  # for the other seats
            raise InputEnded("the input has ended")
        return line.decode(errors="replace").rstrip("\r\n")

    def _read_input(self, loop: asyncio.AbstractEventLoop) -> None:
        # Unbuffered: the lock of sys.stdin would block the exit of the process.
        with suppress(RuntimeError), open(0, "rb", buffering=0, closefd=False) as typed:
            for line in chain(iter(typed.readline, b""), [b""]):
                loop.call_soon_threadsafe(self._typed.put_nowait, line)


class Player(Agent):
    """The agent of a seat that a person plays, or that another agent plays in the person's view.

    A person gets the same observations, choices and rewards as an agent.
    """

    trainable = False
    lines: Lines
    other: Agent | None = None
    total = 0.0
    printed_tools: tuple[dict[str, object], ...] = ()
    """Tools that were printed already."""

    async def act(self, observation: object) -> Action:
        """Return the person's line, or the action of the other agent.

        A scripted agent can only choose. Without choices, the person plays its turn.
        """
        seen = observe(observation)
        other = self.other
        if other is not None and (seen.choices or _can_write(other)):
            action = await other.act(observation)
            self.lines.actions.append(f"[{self.seat.name}] {action.text}")
            return action
        async with self.lines.turn:
            self.lines.show(show(seen, printed_tools=self.printed_tools), f"{self.seat.name}> ")
            self.printed_tools = seen.tools
            line = await self.lines.read()
        if not seen.tools:
            return Action(line, calls=())
        _, calls = read_calls(line, HERMES)
        return Action(line, calls=calls)

    def reward(self, value: float | None, /, **parts: float) -> None:
        """Add a reward to the sum that is printed at the end."""
        super().reward(value, **parts)
        self.total += value or 0.0


def _can_write(agent: Agent) -> bool:
    """Return whether an agent can act without choices; of scripted ones, only some policies can."""
    config = getattr(agent, "config", None)
    return getattr(config, "policy", "answers") == "answers"


def main(argv: Sequence[str]) -> int:
    """Play one episode; return 1 if it failed."""
    options = parse(argv)
    words = [full_key(word, options.env) for word in options.words]
    config = configs.load(ExperimentConfig, [], [f"{COLLECTOR}env.type={options.env}", *words])
    envs.check(options.env)
    try:
        asyncio.run(play(config, options))
    except (EpisodeError, ExceptionGroup) as raised:
        error = first_of(raised, ArealiteError)
        if not isinstance(error, EpisodeError):
            raise
        print("\nyou left" if isinstance(error, InputEnded) else f"\nno reward: {error}")
        return 0 if isinstance(error, InputEnded) else 1
    return 0


def parse(argv: Sequence[str]) -> Namespace:
    """Parse the command line."""
    parser = ArgumentParser(
        prog="arealite play",
        description=fold(str(__doc__)),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("env", metavar="ENV", help="name of the environment")
    parser.add_argument("--seat", action="append", help="your seat; repeatable; all: every one")
    parser.add_argument(
        "--opponent",
        default="scripted",
        help="agent of other seats; scripted: random choices",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the task and the opponent")
    parser.add_argument(
        "--task",
        metavar="FILE",
        help="tasks, as for dataset.train; default: generated tasks",
    )
    parser.add_argument("--row", type=int, default=0, help="number of the task, from 0")
    parser.add_argument("words", nargs="*", metavar="key=value", help="options")
    return parser.parse_intermixed_args(argv)


def full_key(word: str, env: str) -> str:
    """Return an override with the full key of `arealite train`."""
    head, dot, _ = word.split("=", 1)[0].partition(".")
    if dot and head in (env, *field_names(EnvConfig)):
        return f"{COLLECTOR}env.{word}"
    if dot and head == "seats":
        return f"{COLLECTOR}{word}"
    env_config = getattr(EnvConfig(), env, None) or envs.configs.get(env)
    is_env_option = head in field_names(env_config)
    if head in field_names(ExperimentConfig) and not is_env_option:
        return word
    return f"{COLLECTOR}env.{env}.{word}"


async def play(config: ExperimentConfig, options: Namespace) -> None:
    """Play one episode and print its rewards."""
    collector = config.trainer.ppo.collector
    task = find_task(config, options)
    env = make_env(config, collector.env)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(env.close)
        await env.setup()
        players = await make_players(env.seats, config, options, stack)
        await env.run(task, **players)
    first_player = next(iter(players.values()))
    first_player.lines.show("")
    for name, player in players.items():
        record = player.record
        line = f"{name}: "
        line += "no score" if record.is_unscored else f"reward {player.total:g}"
        if record.reward_parts:
            parts = [f"{part}={reward:g}" for part, reward in record.reward_parts.items()]
            line += f" ({', '.join(parts)})"
        print(line)


def find_task(config: ExperimentConfig, options: Namespace) -> Task:
    """Return the task to play.

    Raises:
        UserError: There is no task with this number, or the environment generates no tasks.
    """
    row = options.row
    file = options.task
    env = config.trainer.ppo.collector.env
    tasks: Iterable[Task] = generate(env, "play", options.seed)
    if file:
        tasks = load_tasks(file, "play", config.dataset.columns, keep=reads_columns(env))
    selected = [*islice(tasks, row, row + 1)] if row >= 0 else []
    if not selected:
        raise UserError(f"--row {row}: {file or env.type} has no such row. Rows begin with 0.")
    return selected[0]


async def make_players(
    names: Sequence[str], config: ExperimentConfig, options: Namespace, stack: AsyncExitStack
) -> dict[str, Player]:
    """Create the player of each seat. Closing `stack` closes objects that agents share.

    Raises:
        UserError: A seat or an agent is unknown, or an agent needs the policy of a run.
    """
    collector = config.trainer.ppo.collector
    lines = Lines()
    # These agents do not use the run's client and tokenizer.
    nothing = cast(Any, object())
    factory = AgentFactory(config, client=nothing, tokenizer=nothing)
    own_seats = [*names] if options.seat == ["all"] else options.seat or names[:1]
    unknown_seats = {*own_seats, *collector.seats} - {*names}
    if unknown_seats:
        raise UserError(unknown("seat", min(unknown_seats), names))
    scripted = ScriptedConfig(policy="random", seed=options.seed)
    opponent = replace(collector.agent, type=options.opponent, scripted=scripted)
    players = dict[str, Player]()
    for name in names:
        seat = Seat(name=name, group_id="play", episode_id="play/0")
        player = Player(None, client=nothing, tokenizer=nothing, seat=seat)
        player.lines = lines
        players[name] = player
        if name not in own_seats:
            agent_config = collector.seats.get(name, opponent)
            _check_needs_no_policy(name, agent_config)
            await factory.share(agent_config, stack)
            player.other = factory.make_agent(agent_config, seat)
    return players


def _check_needs_no_policy(seat: str, agent_config: AgentConfig) -> None:
    """Check that the agent of a seat acts without the policy of a run."""
    if agents.get(agent_config.type).trainable:
        raise UserError(
            f"seat '{seat}': agent.type={agent_config.type} needs the policy of a run. "
            f"Use seats.{seat}.type=fixed_policy and its options, or scripted."
        )


def show(seen: Observation, *, printed_tools: Sequence[dict[str, object]] = ()) -> str:
    """Format an observation for a person, without the tools that are in `printed_tools`."""
    lines = [str(seen).rstrip("\n")]
    new_tools = [tool for tool in seen.tools if tool not in printed_tools]
    lines += [f"tool: {tool.get('function', tool)}" for tool in new_tools]
    if new_tools:
        lines.append(CALL)
    if seen.choices:
        lines.append(f"choices: {', '.join(seen.choices)}")
    return "\n".join(filter(None, lines))
