"""Options of the core's agents, from which those of other agents derive."""

from dataclasses import dataclass

from arealite.api.fields import opt


@dataclass(frozen=True, kw_only=True)
class MathCodeSingleStepConfig:
    """An agent with one prompt and one completion."""

    system_prompt: str | None = opt(None, "system message before the task's messages")
    use_chat_template: bool | None = opt(
        None, "send a text as a user message in the model's chat template; null: if it has one"
    )


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """An agent that keeps a conversation of many turns."""

    system_prompt: str | None = opt(None, "system message at the start of the conversation")
    max_turns: int | None = opt(None, "answers after which the agent stops", at_least=1)
    max_tokens: int | None = opt(
        None,
        "limit of a conversation: the agent stops if the next prompt plus max_new_tokens exceeds "
        "it; set it to the servers' context length, beyond which episodes fail",
        at_least=2,
    )
