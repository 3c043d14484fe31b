"""Options of an agent: its type, and the options of each type."""

from dataclasses import dataclass

from arealite.api.fields import named, opt, part, with_options_of


@dataclass(frozen=True, kw_only=True)
class MathCodeSingleStepConfig:
    """An agent with one prompt and one completion."""

    system_prompt: str | None = opt(None, "system message before the task's messages")
    use_chat_template: bool | None = opt(
        None, "send a text as a user message in the model's chat template; null: if it has one"
    )


@dataclass(frozen=True, kw_only=True)
@with_options_of("agent")
class AgentConfig:
    """The agent of a seat."""

    type: str = named("agent", "math_code_single_step", "registered name of the agent")
    math_code_single_step: MathCodeSingleStepConfig = part(MathCodeSingleStepConfig)
