"""A conversation of many turns: every prompt begins with all tokens of the turns before it.

What other agents of many turns are made of: they read the answer differently.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from arealite.api.agent import Agent
from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.api.observation import messages, observe
from arealite.base.errors import ContextOverflow
from arealite.impl.agent.history import History


class ChatAgent(Agent):
    """Answers within a conversation."""

    @cached_property
    def history(self) -> History:
        """The conversation so far."""
        return History(self.tokenizer)

    async def act(self, observation: Any) -> Action:
        """Generate after the conversation and the observation.

        The answer of turn `max_turns` is the last action. Where the next prompt would be over
        `max_tokens`, there is a last action without an answer, of text "".

        Raises:
            ContextOverflow: not even the first prompt is allowed.
        """
        if self.is_over():
            return Action("", is_last=True)
        seen, history = observe(observation), self.history
        system = None if history.messages else self.config.system_prompt
        prompt = history.ask(messages(seen, system=system), seen.tools)
        cap, needed = self.config.max_tokens, len(prompt) + self.seat.sampling.max_new_tokens
        if cap is None or needed <= cap:
            return self.read(await self.generate(prompt))
        if self.record.turns:
            return Action("", is_last=True)
        raise ContextOverflow(
            f"the first prompt has {len(prompt)} tokens: with sampling.max_new_tokens, that is "
            f"{needed - cap} over max_tokens={cap} of the agent. Change one of them."
        )

    def read(self, response: LLMResponse) -> Action:
        """Add an answer to the conversation; return what it says to the environment."""
        return Action(self.history.add(response), response, is_last=self.is_over())

    def is_over(self) -> bool:
        """Whether all turns are taken."""
        return self.record.generations == self.config.max_turns
