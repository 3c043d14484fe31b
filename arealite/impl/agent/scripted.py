"""An agent without a model: it gives the configured answers, or picks one of the offered choices.

For opponents of known strength, and for tests of environments.
"""

import random

from arealite.api.agent import Agent
from arealite.api.agent_config import ScriptedConfig
from arealite.api.episode import Action
from arealite.api.observation import observe
from arealite.base.errors import UserError


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
            what = "agent.type=scripted: scripted.policy=answers needs scripted.answers"
            raise UserError(f"{what}. Set the answers or another policy.")

    async def act(self, observation: object) -> Action:
        """Return the answer of this turn, or one of the observation's choices.

        Raises:
            UserError: The observation offers no choices.
        """
        config = self.config
        seat = self.seat
        turn = self.turn
        self.turn = self.turn + 1
        options = config.answers if config.policy == "answers" else observe(observation).choices
        if not options:
            what = f"seat '{seat.name}', agent.type=scripted: policy={config.policy} needs an"
            fix = "Set policy=answers, or use another environment."
            raise UserError(f"{what} environment that offers choices. {fix}")
        if config.policy == "random":
            member = seat.episode_id.rpartition("/")[2]  # the part before it changes per attempt
            rng = random.Random(f"{config.seed}/{seat.group_id}/{member}/{seat.name}/{turn}")
            return Action(rng.choice(options))
        return Action(options[turn % len(options) if config.policy == "answers" else 0])
