"""A conversation with tools: the agent parses the model's calls, the environment executes them.

The chat template gets an answer with calls as its sampled text, not as a list of calls. A template
would format a list differently, and the prompt would not hold the sampled tokens.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from arealite.api.episode import Action
from arealite.api.llm import LLMResponse
from arealite.api.observation import ToolCall
from arealite.base import log
from arealite.base.registry import unknown
from arealite.ext.agents.chat import ChatAgent
from arealite.ext.gateway.families import HERMES, Family, family_of, foreign
from arealite.ext.gateway.parser import read_calls

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

    templates_observation = True

    def read(self, response: LLMResponse) -> Action:
        """Return an action with the calls and the text around them.

        Malformed calls, calls of unknown tools and a call in another format have an error. The
        reward part `malformed_calls` counts them; its weight is zero. The ids of calls have nine
        letters and digits, the form that the strictest templates require.
        """
        tools = self.history.tools
        call_ids = f"c{len(self.record.turns):04}{{:04}}"
        family = format_of(self.tokenizer, self.config.format)
        answer = self.history.beginning + self.history.add(response)
        text_around, calls = read_calls(answer, family, tools, ids=call_ids)
        tool_names = [str(tool["function"]["name"]) for tool in tools]
        if tool_names and not calls:
            other_format = foreign(text_around, tool_names)
            if other_format:
                error = f"the call has the format {other_format}, not {family.name}"
                calls = (ToolCall(call_id=call_ids.format(0), name="", arguments={}, error=error),)
                self.warn(other_format, text_around)
        calls = tuple(check_name(call, tool_names) for call in calls)
        num_malformed = sum(bool(call.error) for call in calls)
        reward_parts = self.record.reward_parts
        before = reward_parts.get("malformed_calls", 0.0)
        reward_parts["malformed_calls"] = before + num_malformed
        return Action(
            text=text_around,
            response=response,
            calls=calls,
            is_last=self.is_over(),
        )

    def warn(self, other_format: str, answer: str) -> None:
        """Warn, once per process and format, that the model calls tools in another format."""
        if other_format in _seen:
            return
        _seen.add(other_format)
        option = "trainer.ppo.collector.agent.tool_use.format"
        logger.warning(
            "tool call in another format",
            seen=other_format,
            configured=self.config.format,
            text=answer[:200],
            hint=f"Set {option} to the model's format: {' or '.join(FORMATS)}",
        )


def check_name(call: ToolCall, tool_names: Sequence[str]) -> ToolCall:
    """Return the call; without an earlier error, a call of an unknown tool gets an error."""
    if call.error or call.name in tool_names:
        return call
    return replace(call, error=unknown("tool", call.name, tool_names))
