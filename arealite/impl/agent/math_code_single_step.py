"""The built-in agent: one prompt, one completion, for mathematics and code.

Its steps are small methods, so that an agent with another prompt or another reading of the
completion overrides only that one.
"""

from __future__ import annotations

from typing import Any

from arealite.api.agent import Agent
from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.api.observation import messages, observe
from arealite.system.data.chats import tokenize


class MathCodeSingleStepAgent(Agent):
    """Asks the task's prompt and acts with the whole completion."""

    async def act(self, observation: Any) -> Action:
        """Generate once after the observation, a text or a list of chat messages."""
        prompt = self.build_prompt(observation)
        response = await self.generate(tokenize(self.tokenizer, prompt))
        return Action(self.parse(response), response)

    def build_prompt(self, observation: Any) -> str | list[dict[str, Any]]:
        """Return the text to continue, or the chat messages to answer."""
        system = self.config.system_prompt if self.config is not None else None
        if system is None:
            return observe(observation).content
        return messages(observation, system=system)

    def parse(self, response: LLMResponse) -> str:
        """Return what the completion says to the environment."""
        return str(self.tokenizer.decode(response.output_ids, skip_special_tokens=True))
