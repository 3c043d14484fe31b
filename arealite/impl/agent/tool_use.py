"""A conversation with tools: the agent parses the model's calls, the environment executes them.

The chat template gets an answer with calls as its sampled text, not as a list of calls. A template
would format a list differently, and the prompt would not hold the sampled tokens.
"""

from typing import Any

from msgspec.structs import replace

from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.api.observation import ToolCall
from arealite.base import log
from arealite.base.registry import unknown
from arealite.impl.agent.chat import ChatAgent
from arealite.impl.gateway.families import HERMES, Family, family_of, foreign
from arealite.impl.gateway.parser import read_calls

FORMATS = {"hermes": "qwen2_5", "llama_json": "llama3_1", "auto": "auto"}
"""Names of families by the values of the option `format`."""
logger = log.get(__name__)
_seen: set[str] = set()
"""Formats that this process has warned about."""


def format_of(tokenizer: Any, name: str) -> Family:
    """Return the family of the option `format`; `auto`: Hermes if the template has no format."""
    family = family_of(tokenizer, FORMATS[name])
    return HERMES if family.name == "text" else family


class ToolUseAgent(ChatAgent):
    """Calls the tools that observations offer, also several in one turn."""

    def read(self, response: LLMResponse) -> Action:
        """Return an action with the calls and the text around them.

        Malformed calls, calls of unknown tools and a call in another format have an error. The
        reward part `malformed_calls` counts them; its weight is zero. The ids of calls have nine
        letters and digits, the form that the strictest templates require.
        """
        tools = self.history.tools
        ids = f"c{len(self.record.turns):04}{{:04}}"
        family = format_of(self.tokenizer, self.config.format)
        answer = self.history.beginning + self.history.add(response)
        text, calls = read_calls(answer, family, tools, ids=ids)
        known = [str(tool["function"]["name"]) for tool in tools]
        if known and not calls and (other := foreign(text, known)):
            error = f"the call has the format {other}, not {family.name}"
            calls = (ToolCall(ids.format(0), "", {}, error),)
            self.warn(other, text)
        wrong = {c.name: unknown("tool", c.name, known) for c in calls if c.name not in known}
        calls = tuple(replace(c, error=c.error or wrong.get(c.name, "")) for c in calls)
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
