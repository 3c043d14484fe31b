"""The options of the built-in agents.

Apart from the contract, so that an agent is read without the options of all others.
"""

from __future__ import annotations

from dataclasses import dataclass

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class MathCodeSingleStepConfig:
    """One prompt, one completion."""

    system_prompt: str | None = opt(None, "system message put before the task's own messages")


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """A conversation of many turns."""

    system_prompt: str | None = opt(None, "system message at the beginning")


@dataclass(frozen=True, kw_only=True)
class ToolUseConfig:
    """A conversation with tool calls."""

    system_prompt: str | None = opt(None, "system message at the beginning")


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """A conversation with thoughts."""

    system_prompt: str | None = opt(None, "system message at the beginning")


@dataclass(frozen=True, kw_only=True)
class ScriptedConfig:
    """A seat without a model."""

    seed: int = opt(0, "of random choices")


@dataclass(frozen=True, kw_only=True)
class FixedPolicyConfig:
    """A seat played by another model, which is not trained."""

    base_url: str = opt("", "OpenAI-style endpoint, as in http://127.0.0.1:8000/v1")


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Which agent sits in a seat."""

    type: str = opt("math_code_single_step", "name in the table of agents")
    math_code_single_step: MathCodeSingleStepConfig = sub(
        MathCodeSingleStepConfig, "options of type=math_code_single_step"
    )
    chat: ChatConfig = sub(ChatConfig, "options of type=chat")
    tool_use: ToolUseConfig = sub(ToolUseConfig, "options of type=tool_use")
    reasoning: ReasoningConfig = sub(ReasoningConfig, "options of type=reasoning")
    scripted: ScriptedConfig = sub(ScriptedConfig, "options of type=scripted")
    fixed_policy: FixedPolicyConfig = sub(FixedPolicyConfig, "options of type=fixed_policy")
