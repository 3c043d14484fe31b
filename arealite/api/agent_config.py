"""The options of the built-in agents.

Apart from the contract, so that an agent is read without the options of all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, sub
from arealite.api.llm import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class MathCodeSingleStepConfig:
    """One prompt, one completion."""

    system_prompt: str | None = opt(None, "system message put before the task's own messages")


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """A conversation of many turns."""

    system_prompt: str | None = opt(None, "system message at the beginning")
    max_turns: int | None = opt(None, "it acts no more after this many answers", at_least=1)
    max_tokens: int | None = opt(
        None,
        "of a whole conversation: it acts no more where the next prompt and max_new_tokens would "
        "exceed this; best the context of the servers, beyond which episodes fail",
        at_least=2,
    )


@dataclass(frozen=True, kw_only=True)
class ToolUseConfig(ChatConfig):
    """A conversation with tool calls."""

    format: Literal["hermes", "llama_json"] = opt(
        "hermes", 'how the model writes calls; llama_json: a bare {"name": …, "parameters": {…}}'
    )


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig(ChatConfig):
    """A conversation with thoughts."""

    begin: str = opt("<think>", "mark before a thought")
    end: str = opt("</think>", "mark after a thought; what follows is the answer")
    keep: Literal["all", "last", "none"] = opt(
        "all", "which earlier thoughts the next prompt has; dropping begins a new segment"
    )


@dataclass(frozen=True, kw_only=True)
class ScriptedConfig:
    """A seat without a model."""

    policy: Literal["answers", "random", "first"] = opt(
        "answers", "random, first: of the choices that the environment offers"
    )
    answers: list[str] = sub(list, "of policy=answers, a turn each, then from the first one again")
    seed: int = opt(0, "of random choices")


@dataclass(frozen=True, kw_only=True)
class FixedPolicyConfig(ChatConfig):
    """A seat played by another model, which is not trained."""

    server: str = opt("", "EXPERIMENT/TRIAL of a launch_llm_server of its own")
    model_path: str | None = opt(None, "the folder of that server's model; null: as model.path")
    base_url: str = opt(
        "", "instead: an OpenAI-style endpoint, as in http://127.0.0.1:8000/v1 (no max_tokens)"
    )
    model: str = opt("default", "which model of base_url")
    api_key_env: str | None = opt(None, "environment variable with the key for base_url")
    timeout_s: float = opt(120.0, "one try at base_url", above=0)
    retries: int = opt(3, "further tries after errors of base_url", at_least=0)
    connections: int = opt(64, "requests of one worker at base_url at a time", at_least=1)
    sampling: SamplingConfig = sub(SamplingConfig, "how its tokens are drawn")


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
