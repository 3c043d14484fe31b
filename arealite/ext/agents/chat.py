"""A conversation of several turns: each prompt starts with all tokens of the earlier turns.

Other agents with several turns derive from ChatAgent and override `read`.
"""

from functools import cached_property

from arealite.api.agent import Agent
from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.api.observation import messages, observe
from arealite.base.errors import ContextOverflow
from arealite.ext.agents.history import History


class ChatAgent(Agent):
    """Answers each observation as the next turn of one conversation."""

    templates_observation = True

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
        observed = observe(observation)
        history = self.history
        system = None if history.messages else self.config.system_prompt
        prompt_ids = history.ask(messages(observed, system=system), observed.tools)
        max_tokens = self.config.max_tokens
        num_needed = len(prompt_ids) + self.seat.sampling.max_new_tokens
        if max_tokens is None or num_needed <= max_tokens:
            response = await self.generate(prompt_ids)
            return self.read(response)
        if self.record.turns:
            return Action("", is_last=True)
        raise ContextOverflow(
            f"the first prompt has {len(prompt_ids)} tokens. "
            f"With sampling.max_new_tokens, that is {num_needed - max_tokens} more than "
            f"max_tokens={max_tokens} of the agent. Raise max_tokens or lower max_new_tokens."
        )

    def read(self, response: LLMResponse) -> Action:
        """Add an answer to the conversation; return the action it means.

        The text of the action includes the answer's beginning, if the prompt ended with one.
        """
        beginning = self.history.beginning
        answer = self.history.add(response)
        return Action(beginning + answer, response, is_last=self.is_over())

    def is_over(self) -> bool:
        """Return whether the agent has generated `max_turns` answers."""
        return self.record.generations == self.config.max_turns
