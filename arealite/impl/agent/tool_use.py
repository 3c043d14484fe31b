"""A conversation in which the model calls tools: it reads the calls, the environment makes them.

To the template an answer with calls is the text that was sampled, not a list of calls that it
would write in its own way: so prompts hold the sampled tokens.
"""

from __future__ import annotations

from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.api.observation import ToolCall
from arealite.base.registry import unknown
from arealite.impl.agent.calls import FORMATS, Call
from arealite.impl.agent.chat import ChatAgent


class ToolUseAgent(ChatAgent):
    """Calls the tools that observations offer, several in a turn if it likes."""

    def read(self, response: LLMResponse) -> Action:
        """Return the calls, and the text around them; those that cannot be made have an error.

        The part `malformed_calls` of the reward counts the latter, and is worth nothing.
        """
        text, found = FORMATS[self.config.format](self.history.add(response))
        known = [str(tool["function"]["name"]) for tool in self.history.tools]
        calls = tuple(self.check(call, index, known) for index, call in enumerate(found))
        parts = self.record.reward_parts
        bad = sum(bool(call.error) for call in calls)
        parts["malformed_calls"] = parts.get("malformed_calls", 0.0) + bad
        return Action(text, response, calls, self.is_over())

    def check(self, call: Call, index: int, known: list[str]) -> ToolCall:
        """Give a call its id, nine letters and digits as the strictest templates ask, and an error
        if there is no such tool."""
        error = call.error
        if not error and call.name not in known:
            error = unknown("tool", call.name, known)
        return ToolCall(f"c{len(self.record.turns):04}{index:04}", call.name, call.arguments, error)
