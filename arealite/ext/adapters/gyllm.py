"""Adapter of Request environments: those of `arealite.make` and GyLLM's (RedTachyon/gyllm).

A step returns Requests (`arealite.Request`), or GyLLM's dicts. The name of an actor may have a
suffix, as in "agent::key=value".
"""

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from arealite.api.agent import Agent
from arealite.api.episode import Action
from arealite.api.observation import Observation, Request
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.adapters.blocking import Instance
from arealite.ext.adapters.config import GyLLMConfig
from arealite.ext.adapters.foreign import LibraryEnv, seed_of

UnreadObservations = defaultdict[str, list[Observation]]
"""Observations that a seat has not acted on yet, by seat."""


class BadRequests(EpisodeError, failure_class="bad_requests"):
    """The environment returned requests that the seats cannot answer."""


class GyLLMEnv(LibraryEnv):
    """Actors with open requests act concurrently. Each actor has a seat with the same name."""

    package = install = "gyllm"
    seats = ()
    """None before the config names them."""

    def __init__(self, args: TrialConfig, config: GyLLMConfig) -> None:
        super().__init__(args, config)
        self.seats = tuple(config.seats)

    def check_env(self, env: object) -> None:
        """Check that the seats are the actors of `env`.

        Raises:
            UserError: They differ.
        """
        actors = getattr(env, "actors", None) or getattr(env, "agents", self.seats)
        actor_names = set(actors)
        if actor_names != set(self.seats):
            raise UserError(
                f"env.gyllm.seats={self.config.seats}: "
                f"the environment's actors are {sorted(actor_names)}. "
                "Set seats to these names."
            )

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reset with the task's seed, then let actors act until no request needs an action.

        Raises:
            BadRequests: A request names an unknown actor, or an actor has two requests.
        """
        config = self.config
        num_illegal = 0
        unread = UnreadObservations(list)
        async with self.instance() as instance:
            begin = self._reset(instance, seed_of(task))
            requests = as_requests(await instance.call(begin))
            for _ in range(config.max_steps):
                actors = take(requests, agents, unread)
                if not actors or any(request.done for request in requests):
                    return
                answers = await act_concurrently(actors, agents, unread)
                actions = {actor: as_action(answer) for actor, answer in answers.items()}
                try:
                    values = await instance.call(instance.env.step, actions)
                    requests = as_requests(values)
                except Exception as error:
                    if type(error).__name__ != "ActionError":
                        raise
                    num_illegal += 1
                    complaint = Observation(str(error))
                    requests = []
                    for seat, actor in actors.items():
                        request = Request(actor=actor, observation=complaint, needs_action=True)
                        requests.append(request)
                        agents[seat].reward(config.illegal_reward, illegal=1.0)
                has_last_answer = any(answer.is_last for answer in answers.values())
                if num_illegal >= config.max_illegal or has_last_answer:
                    take(requests, agents, unread)
                    return

    def _reset(self, instance: Instance, seed: int) -> Callable[[], Any]:
        """Return a call of the environment's `reset`, which takes keywords or a dict of options."""
        options = {**self.config.options, "seed": seed}
        reset = instance.env.reset
        takes_seed = "seed" in inspect.signature(reset).parameters
        if takes_seed:
            return partial(reset, **options)
        return partial(reset, options)


async def act_concurrently(
    actors: Mapping[str, str],
    agents: Mapping[str, Agent],
    unread: UnreadObservations,
) -> dict[str, Action]:
    """Return the actions of agents by actor. All of them act concurrently.

    Args:
        actors: The actors that must act, by seat.
        agents: Agents by seat.
        unread: Observations by seat; those of the acting seats are removed.
    """
    observations = {seat: joined(unread.pop(seat)) for seat in actors}
    turns: dict[str, asyncio.Task[Action]] = {}
    async with asyncio.TaskGroup() as group:
        for seat, actor in actors.items():
            act = agents[seat].act(observations[seat])
            turns[actor] = group.create_task(act)
    return {actor: turn.result() for actor, turn in turns.items()}


def as_action(answer: Action) -> Action | str:
    """Return an answer with tool calls unchanged, and the text of any other."""
    return answer if answer.calls else answer.text


def take(
    requests: Sequence[Request],
    agents: Mapping[str, Agent],
    unread: UnreadObservations,
) -> dict[str, str]:
    """Pass the rewards of requests to the agents and collect their observations.

    An environment may start the next episode by itself; requests of that episode are ignored.

    Args:
        requests: The requests of one step.
        agents: Agents by seat.
        unread: Observations by seat that the agent has not seen yet; extended.

    Returns:
        The actors that must act, by seat.

    Raises:
        BadRequests: A request names an unknown actor, or an actor has two requests.
    """
    actors: dict[str, str] = {}
    for request in requests:
        if request.episode_id != requests[0].episode_id:
            break
        seat, _, _ = request.actor.partition("::")
        if seat not in agents or seat in actors:
            problem = f"the seats are {[*agents]}"
            if seat in actors:
                problem = "it has another request"
            raise BadRequests(
                f"a request for actor {request.actor}, but {problem}. Do not batch environments."
            )
        pass_reward(request, agents[seat])
        if request.observation.content:
            unread[seat].append(request.observation)
        if request.needs_action:
            actors[seat] = request.actor
    return actors


def pass_reward(request: Request, agent: Agent) -> None:
    """Give an agent the reward of a request, and its numbers as parts.

    A trained agent without a turn gets none: no token of its own led to the reward.
    """
    parts: dict[str, float] = {}
    for name, part in request.info.items():
        if isinstance(part, int | float):
            parts[name] = float(part)
    has_reward = bool(request.reward or parts)
    takes_reward = bool(agent.record.turns) or not agent.trainable
    if has_reward and takes_reward:
        agent.reward(request.reward, **parts)


def as_requests(values: Iterable[Request | Mapping[str, Any]]) -> list[Request]:
    """Return Requests; GyLLM's dicts are converted.

    Such a dict has the keys `actor`, `message` {role, content}, `reward` of the actor's last
    action, `needs_action`, and optionally `system_message`, `episode_id` and `episode_end`.
    """
    requests: list[Request] = []
    for value in values:
        request = value if isinstance(value, Request) else _from_dict(value)
        requests.append(request)
    return requests


def _from_dict(fields: Mapping[str, Any]) -> Request:
    """Convert one of GyLLM's dicts."""
    contents: list[str] = []
    for key in ("system_message", "message"):
        message = fields.get(key)
        if message:
            contents.append(message["content"])
    return Request(
        actor=fields["actor"],
        observation=Observation("\n\n".join(contents)),
        reward=float(fields.get("reward") or 0.0),
        needs_action=bool(fields["needs_action"]),
        done=bool(fields.get("episode_end")),
        episode_id=str(fields.get("episode_id", "")),
    )


def joined(observations: Sequence[Observation]) -> object:
    """Return several observations as one; without choices and tools as its content."""
    if not observations:
        return ""
    last = observations[-1]
    if len(observations) > 1:
        content = "\n\n".join(map(str, observations))
        last = replace(last, content=content)
    if last.choices or last.tools:
        return last
    return last.content
