"""A conversation with tools: the agent parses the model's calls, the environment executes them.

The chat template gets an answer with calls as its sampled text, not as a list of calls. A template
would format a list differently, and the prompt would not hold the sampled tokens.
"""

from __future__ import annotations

from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.api.observation import ToolCall
from arealite.base import log
from arealite.base.registry import unknown
from arealite.impl.agent.calls import FORMATS, Call, foreign
from arealite.impl.agent.chat import ChatAgent

logger = log.get(__name__)
_seen: set[str] = set()
"""Formats that this process has warned about."""


class ToolUseAgent(ChatAgent):
    """Calls the tools that observations offer, also several in one turn."""

    def read(self, response: LLMResponse) -> Action:
        """Return an action with the calls and the text around them.

        Malformed calls, calls of unknown tools and a call in another format have an error. The
        reward part `malformed_calls` counts them; its weight is zero.
        """
        text, found = FORMATS[self.config.format](self.history.add(response))
        known = [str(tool["function"]["name"]) for tool in self.history.tools]
        if known and not found and (other := foreign(text, known)):
            found = [Call(error=f"the call has the format {other}, not {self.config.format}")]
            self.warn(other, text)
        calls = tuple(self.check(call, index, known) for index, call in enumerate(found))
        parts = self.record.reward_parts
        bad = sum(bool(call.error) for call in calls)
        parts["malformed_calls"] = parts.get("malformed_calls", 0.0) + bad
        return Action(text, response, calls, self.is_over())

    def warn(self, other: str, text: str) -> None:
        """Warn, once per process and format, that the model calls tools in another format."""
        if other not in _seen:
            _seen.add(other)
            option = "trainer.ppo.collector.agent.tool_use.format"
            hint = f"Set {option} to the model's format: {' or '.join(FORMATS)}"
            fields = {"seen": other, "configured": self.config.format, "text": text[:200]}
            logger.warning("tool call in another format", **fields, hint=hint)

    def check(self, call: Call, index: int, known: list[str]) -> ToolCall:
        """Return a call with an id, and with an error if the tool is unknown.

        The id has nine letters and digits, the form that the strictest templates require.
        """
        error = call.error
        if not error and call.name not in known:
            error = unknown("tool", call.name, known)
        return ToolCall(f"c{len(self.record.turns):04}{index:04}", call.name, call.arguments, error)
