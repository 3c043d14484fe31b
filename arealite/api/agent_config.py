"""Options of an agent: its type, and the options of each type."""

from dataclasses import dataclass

from arealite.api.agent_options import ChatConfig, MathCodeSingleStepConfig
from arealite.api.fields import named, part, with_options_of


@dataclass(frozen=True, kw_only=True)
@with_options_of("agent")
class AgentConfig:
    """The agent of a seat."""

    type: str = named("agent", "math_code_single_step", "registered name of the agent")
    math_code_single_step: MathCodeSingleStepConfig = part(MathCodeSingleStepConfig)
    chat: ChatConfig = part(ChatConfig)
