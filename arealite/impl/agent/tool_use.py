"""A conversation in which the model calls tools: it reads the calls, the environment makes them.

To the template an answer with calls is the text that was sampled, not a list of calls that it
would write in its own way: so prompts hold the sampled tokens.
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
"""Formats of which this process has warned."""


class ToolUseAgent(ChatAgent):
    """Calls the tools that observations offer, several in a turn if it likes."""

    def read(self, response: LLMResponse) -> Action:
        """Return the calls, and the text around them; those that cannot be made have an error.

        A call in a format other than the configured one has an error, too. The part
        `malformed_calls` of the reward counts calls with an error, and has no weight.
        """
        text, found = FORMATS[self.config.format](self.history.add(response))
        known = [str(tool["function"]["name"]) for tool in self.history.tools]
        if known and not found and (other := foreign(text, known)):
            found = [Call(error=f"a call in the format {other}, not in {self.config.format}")]
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
            hint = "Set trainer.ppo.collector.agent.tool_use.format to what the model writes: "
            told = {"seen": other, "configured": self.config.format, "text": text[:200]}
            logger.warning("tool call in another format", **told, hint=hint + " or ".join(FORMATS))

    def check(self, call: Call, index: int, known: list[str]) -> ToolCall:
        """Give a call its id, nine letters and digits as the strictest templates ask, and an error
        if there is no such tool."""
        error = call.error
        if not error and call.name not in known:
            error = unknown("tool", call.name, known)
        return ToolCall(f"c{len(self.record.turns):04}{index:04}", call.name, call.arguments, error)
