"""Adapter of Request environments: those of `arealite.make` and GyLLM's (RedTachyon/gyllm).

A step returns Requests (`arealite.Request`), or GyLLM's dicts. The name of an actor may have a
suffix, as in "agent::key=value".
"""

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from arealite.api.adapter_config import GyLLMConfig
from arealite.api.agent import Agent
from arealite.api.observation import Observation, Request
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import EpisodeError, UserError
from arealite.impl.env.adapters.foreign import LibraryEnv, seed_of

Unread = defaultdict[str, list[Observation]]
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
        actors = {*(getattr(env, "actors", None) or getattr(env, "agents", self.seats))}
        if actors != {*self.seats}:
            what = f"env.gyllm.seats={self.config.seats}: the environment's actors are"
            raise UserError(f"{what} {sorted(actors)}. Set seats to these names.")

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reset with the task's seed, then let actors act until no request needs an action.

        Raises:
            BadRequests: A request names an unknown actor, or an actor has two requests.
        """
        config = self.config
        illegal = 0
        unread = Unread(list)
        async with self.instance() as instance:
            options = {**config.options, "seed": seed_of(task)}
            reset = instance.env.reset
            takes_seed = "seed" in inspect.signature(reset).parameters
            begin = partial(reset, **options) if takes_seed else partial(reset, options)
            requests = as_requests(await instance.call(begin))
            for _ in range(config.max_steps):
                asked = take(requests, agents, unread)
                if not asked or any(request.done for request in requests):
                    return
                shown = {seat: joined(unread.pop(seat)) for seat in asked}
                async with asyncio.TaskGroup() as turns:
                    acting = {
                        actor: turns.create_task(agents[seat].act(shown[seat]))
                        for seat, actor in asked.items()
                    }
                answers = {actor: turn.result() for actor, turn in acting.items()}
                actions = {a: given if given.calls else given.text for a, given in answers.items()}
                try:
                    requests = as_requests(await instance.call(instance.env.step, actions))
                except Exception as error:
                    if type(error).__name__ != "ActionError":
                        raise
                    illegal += 1
                    again = Observation(str(error))
                    requests = [Request(actor, again, needs_action=True) for actor in answers]
                    for seat in asked:
                        agents[seat].reward(config.illegal_reward, illegal=1.0)
                if illegal >= config.max_illegal or any(a.is_last for a in answers.values()):
                    take(requests, agents, unread)
                    return


def take(
    requests: Sequence[Request], agents: Mapping[str, Agent], unread: Unread
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
    asked = dict[str, str]()
    for request in requests:
        if request.episode_id != requests[0].episode_id:
            break
        seat = request.actor.partition("::")[0]
        if seat not in agents or seat in asked:
            why = "it has another request" if seat in asked else f"the seats are {[*agents]}"
            what = f"a request for actor {request.actor}, but {why}"
            raise BadRequests(f"{what}. Do not batch environments.")
        agent = agents[seat]
        info = request.info.items()
        parts = {name: float(part) for name, part in info if isinstance(part, int | float)}
        if (request.reward or parts) and (agent.record.turns or not agent.trainable):
            agent.reward(request.reward, **parts)
        if request.observation.content:
            unread[seat].append(request.observation)
        if request.needs_action:
            asked[seat] = request.actor
    return asked


def as_requests(values: Iterable[Request | Mapping[str, Any]]) -> list[Request]:
    """Return Requests; GyLLM's dicts are converted.

    Such a dict has the keys `actor`, `message` {role, content}, `reward` of the actor's last
    action, `needs_action`, and optionally `system_message`, `episode_id` and `episode_end`.
    """
    return [value if isinstance(value, Request) else _from_dict(value) for value in values]


def _from_dict(value: Mapping[str, Any]) -> Request:
    messages = filter(None, (value.get("system_message"), value.get("message")))
    return Request(
        value["actor"],
        Observation("\n\n".join(message["content"] for message in messages)),
        reward=float(value.get("reward") or 0.0),
        needs_action=bool(value["needs_action"]),
        done=bool(value.get("episode_end")),
        episode_id=str(value.get("episode_id", "")),
    )


def joined(seen: Sequence[Observation]) -> object:
    """Return several observations as one; without choices and tools as its content."""
    last = seen[-1] if seen else Observation("")
    if len(seen) > 1:
        last = replace(last, content="\n\n".join(map(str, seen)))
    return last if last.choices or last.tools else last.content
