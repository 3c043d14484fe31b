"""Adapter of GyLLM environments (github.com/RedTachyon/gyllm): a step returns Requests for actors.

A Request is a dict with the keys `actor` ("agent", or "agent::key=value"), `message`
{role, content}, `reward` of the actor's last action and `needs_action`. The first one of an episode
also has `system_message`, the last one `episode_end`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from arealite.api.adapter_config import GyLLMConfig
from arealite.api.agent import Agent
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import EpisodeError, UserError
from arealite.impl.env.adapters.foreign import LibraryEnv, seed_of


class BadRequests(EpisodeError):
    """The environment returned requests that the seats cannot answer."""

    failure_class = "bad_requests"


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
        actors = {*getattr(env, "agents", self.seats)}
        if actors != {*self.seats}:
            raise UserError(
                f"env.gyllm.seats={self.config.seats}: the environment's actors are "
                f"{sorted(actors)}. Set seats to these names."
            )

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reset with the task's seed, then let actors act until no request needs an action.

        Raises:
            BadRequests: A request names an unknown actor, or an actor has two requests.
        """
        config, illegal = self.config, 0
        unread: defaultdict[str, list[str]] = defaultdict(list)
        async with self.instance() as instance:
            options = {**config.options, "seed": seed_of(task)}
            requests = await instance.call(instance.env.reset, options)
            for _ in range(config.max_steps):
                asked = take(requests, agents, unread)
                if not asked or any(request.get("episode_end") for request in requests):
                    return
                texts = {actor: "\n\n".join(unread.pop(seat)) for seat, actor in asked.items()}
                async with asyncio.TaskGroup() as turns:
                    acting = {
                        actor: turns.create_task(agents[seat].act(texts[actor]))
                        for seat, actor in asked.items()
                    }
                answers = {actor: turn.result() for actor, turn in acting.items()}
                try:
                    actions = {actor: answer.text for actor, answer in answers.items()}
                    requests = await instance.call(instance.env.step, actions)
                except Exception as error:
                    if type(error).__name__ != "ActionError":
                        raise
                    illegal += 1
                    requests = refused(asked, str(error))
                    for seat in asked:
                        agents[seat].reward(config.illegal_reward, illegal=1.0)
                if illegal >= config.max_illegal or any(a.is_last for a in answers.values()):
                    take(requests, agents, unread)
                    return


def take(
    requests: Sequence[Any], agents: dict[str, Agent], unread: defaultdict[str, list[str]]
) -> dict[str, str]:
    """Pass the rewards of requests to the agents and collect their messages.

    An environment may start the next episode by itself; requests of that episode are ignored.

    Args:
        requests: The requests of one step.
        agents: Agents by seat.
        unread: Messages by seat that the agent has not seen yet; extended.

    Returns:
        The actors that must act, by seat.

    Raises:
        BadRequests: A request names an unknown actor, or an actor has two requests.
    """
    asked = dict[str, str]()
    episode = requests[0].get("episode_id") if requests else None
    for request in requests:
        if request.get("episode_id") != episode:
            break
        actor = request["actor"]
        seat = actor.partition("::")[0]
        if seat not in agents or seat in asked:
            why = "it has another request" if seat in asked else f"the seats are {[*agents]}"
            raise BadRequests(f"a request for actor {actor}, but {why}. Do not batch environments.")
        reward = float(request.get("reward") or 0.0)
        agent = agents[seat]
        if reward and (agent.record.turns or not agent.trainable):
            agent.reward(reward)
        messages = (request.get("system_message"), request.get("message"))
        unread[seat] += [message["content"] for message in messages if message]
        if request["needs_action"]:
            asked[seat] = actor
    return asked


def refused(asked: dict[str, str], why: str) -> list[dict[str, object]]:
    """Return new requests for actors whose actions were refused for the reason `why`."""
    message = {"role": "user", "content": why}
    return [{"actor": actor, "message": message, "needs_action": True} for actor in asked.values()]
