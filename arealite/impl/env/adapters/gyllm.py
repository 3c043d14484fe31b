"""Environment: GyLLM's kind, in which every step answers with Requests, one an actor.

A Request is a dict: `actor` ("agent", perhaps with "::key=value"), `message` {role, content},
`reward` of the actor's last action, `needs_action`; with `system_message` where an episode begins
and `episode_end` where it ends (github.com/RedTachyon/gyllm).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from arealite.api.agent import Agent
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.impl.env.adapters.foreign import LibraryEnv, seed_of


class BadRequests(EpisodeError):
    """The environment asked for what cannot be given."""

    failure_class = "bad_requests"


class GyLLMEnv(LibraryEnv):
    """All actors that are asked act at once; each has a seat of its name."""

    package = install = "gyllm"
    seats = ()
    """None before the config names them."""

    def __init__(self, args: Any, config: Any) -> None:
        super().__init__(args, config)
        self.seats = tuple(config.seats)

    def check_env(self, env: Any) -> None:
        """Check that the seats are the actors of `env`.

        Raises:
            UserError: they are not.
        """
        theirs = {*getattr(env, "agents", self.seats)}
        if theirs != {*self.seats}:
            raise UserError(
                f"env.gyllm.seats={self.config.seats}: its actors are {sorted(theirs)}."
            )

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reset with the task's seed, then let the asked actors act until nobody is.

        Raises:
            BadRequests: see there.
        """
        config, illegal = self.config, 0
        told: defaultdict[str, list[str]] = defaultdict(list)
        async with self.instance() as instance:
            options = {**config.options, "seed": seed_of(task)}
            requests = await instance.call(instance.env.reset, options)
            for _ in range(config.max_steps):
                asked = take(requests, agents, told)
                if not asked or any(request.get("episode_end") for request in requests):
                    return
                texts = {actor: "\n\n".join(told.pop(seat)) for seat, actor in asked.items()}
                async with asyncio.TaskGroup() as turns:
                    acting = {
                        actor: turns.create_task(agents[seat].act(texts[actor]))
                        for seat, actor in asked.items()
                    }
                answers = {actor: turn.result() for actor, turn in acting.items()}
                try:
                    said = {actor: answer.text for actor, answer in answers.items()}
                    requests = await instance.call(instance.env.step, said)
                except Exception as error:
                    if type(error).__name__ != "ActionError":
                        raise
                    illegal += 1
                    requests = refused(asked, str(error))
                    for seat in asked:
                        agents[seat].reward(config.illegal_reward, illegal=1.0)
                if illegal >= config.max_illegal or any(a.is_last for a in answers.values()):
                    take(requests, agents, told)
                    return


def take(
    requests: Sequence[Any], agents: dict[str, Agent], told: defaultdict[str, list[str]]
) -> dict[str, str]:
    """Give agents their rewards and note what they are told; return who is asked: seat → actor.

    Of an environment that begins anew by itself, what comes after the episode's end is not ours.
    """
    asked = dict[str, str]()
    episode = requests[0].get("episode_id") if requests else None
    for request in requests:
        if request.get("episode_id") != episode:
            break
        actor = request["actor"]
        seat = actor.partition("::")[0]
        if seat not in agents or seat in asked:
            why = "another request is open" if seat in asked else f"seats are {[*agents]}"
            raise BadRequests(f"a request for {actor}, but {why}; give one that is not batched")
        reward = float(request.get("reward") or 0.0)
        agent = agents[seat]
        if reward and (agent.record.turns or not agent.trainable):
            agent.reward(reward)
        messages = (request.get("system_message"), request.get("message"))
        told[seat] += [message["content"] for message in messages if message]
        if request["needs_action"]:
            asked[seat] = actor
    return asked


def refused(asked: dict[str, str], why: str) -> list[dict[str, Any]]:
    """Return the requests that ask actors again, since their actions were refused."""
    message = {"role": "user", "content": why}
    return [{"actor": actor, "message": message, "needs_action": True} for actor in asked.values()]
