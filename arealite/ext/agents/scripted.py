"""An agent without a model: it gives the configured answers, or picks one of the offered choices.

For opponents of known strength, and for tests of environments.
"""

import random

from arealite.api.agent import Agent
from arealite.api.episode import Action
from arealite.api.observation import observe
from arealite.base.errors import UserError
from arealite.ext.agents.config import ScriptedConfig


class ScriptedAgent(Agent):
    """Acts by a rule. Its actions are the same in every attempt at an episode."""

    trainable = False
    turn = 0

    @classmethod
    def share(cls, args: object, config: ScriptedConfig) -> None:
        """Check the options; the agents share nothing.

        Raises:
            UserError: The policy is `answers` and there are no answers.
        """
        if config.policy == "answers" and not config.answers:
            raise UserError(
                "agent.type=scripted: scripted.policy=answers needs scripted.answers. "
                "Set the answers or another policy."
            )

    async def act(self, observation: object) -> Action:
        """Return the answer of this turn, or one of the observation's choices.

        Raises:
            UserError: The observation offers no choices.
        """
        config = self.config
        seat = self.seat
        turn = self.turn
        self.turn = self.turn + 1
        is_listed = config.policy == "answers"
        actions = config.answers if is_listed else observe(observation).choices
        if not actions:
            raise UserError(
                f"seat '{seat.name}', agent.type=scripted: policy={config.policy} needs an "
                "environment that offers choices. "
                "Set policy=answers, or use another environment."
            )
        if config.policy == "random":
            # The part before the member changes with each attempt.
            _, _, member = seat.episode_id.rpartition("/")
            rng = random.Random(f"{config.seed}/{seat.group_id}/{member}/{seat.name}/{turn}")
            return Action(rng.choice(actions))
        position = turn % len(actions) if is_listed else 0
        return Action(actions[position])
