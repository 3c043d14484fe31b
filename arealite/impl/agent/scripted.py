"""A seat without a model: it says what is listed, or chooses among what the environment offers.

For opponents of known strength, and for tests of environments.
"""

from __future__ import annotations

import random
from typing import Any

from arealite.api.agent import Agent
from arealite.api.agent_config import ScriptedConfig
from arealite.api.episode import Action
from arealite.api.observation import observe
from arealite.base.errors import UserError


class ScriptedAgent(Agent):
    """Acts by a rule; the same in every attempt at an episode."""

    trainable = False
    turn = 0

    @classmethod
    def share(cls, args: Any, config: ScriptedConfig) -> None:
        """Share nothing.

        Raises:
            UserError: it is to answer, and has no answers.
        """
        if config.policy == "answers" and not config.answers:
            raise UserError("agent.type=scripted: set scripted.answers or another scripted.policy.")

    async def act(self, observation: Any) -> Action:
        """Return the turn's answer, or a choice.

        Raises:
            UserError: there is none.
        """
        config, seat = self.config, self.seat
        turn, self.turn = self.turn, self.turn + 1
        options = config.answers if config.policy == "answers" else observe(observation).choices
        if not options:
            raise UserError(
                f"seat '{seat.name}', agent.type=scripted: policy={config.policy} needs an "
                "environment that offers choices."
            )
        if config.policy == "random":
            member = seat.episode_id.rpartition("/")[2]  # what is before it is of the attempt
            dice = random.Random(f"{config.seed}/{seat.group_id}/{member}/{seat.name}/{turn}")
            return Action(dice.choice(options))
        return Action(options[turn % len(options) if config.policy == "answers" else 0])
