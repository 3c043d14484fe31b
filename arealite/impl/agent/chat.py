"""A conversation of several turns: each prompt starts with all tokens of the earlier turns.

Other agents with several turns derive from ChatAgent and override `read`.
"""

from functools import cached_property

from arealite.api.agent import Agent
from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.api.observation import messages, observe
from arealite.base.errors import ContextOverflow
from arealite.impl.agent.history import History


class ChatAgent(Agent):
    """Answers each observation as the next turn of one conversation."""

    @cached_property
    def history(self) -> History:
        """The messages and tokens of the conversation."""
        return History(self.tokenizer)

    async def act(self, observation: object) -> Action:
        """Append the observation to the conversation and generate an answer.

        The action of turn `max_turns` is the last one. If a later prompt would exceed
        `max_tokens`, nothing is generated and the last action has the text "".

        Raises:
            ContextOverflow: The first prompt exceeds `max_tokens`.
        """
        if self.is_over():
            return Action("", is_last=True)
        seen = observe(observation)
        history = self.history
        system = None if history.messages else self.config.system_prompt
        prompt = history.ask(messages(seen, system=system), seen.tools)
        cap = self.config.max_tokens
        needed = len(prompt) + self.seat.sampling.max_new_tokens
        if cap is None or needed <= cap:
            return self.read(await self.generate(prompt))
        if self.record.turns:
            return Action("", is_last=True)
        what = f"the first prompt has {len(prompt)} tokens. With sampling.max_new_tokens, that is"
        what += f" {needed - cap} more than max_tokens={cap} of the agent"
        raise ContextOverflow(f"{what}. Raise max_tokens or lower max_new_tokens.")

    def read(self, response: LLMResponse) -> Action:
        """Add an answer to the conversation; return the action it means.

        The text of the action includes the answer's beginning, if the prompt ended with one.
        """
        text = self.history.beginning + self.history.add(response)
        return Action(text, response, is_last=self.is_over())

    def is_over(self) -> bool:
        """Return whether the agent has generated `max_turns` answers."""
        return self.record.generations == self.config.max_turns
