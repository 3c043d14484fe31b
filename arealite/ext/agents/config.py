"""Options of the agents."""

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, sub
from arealite.api.llm import SamplingConfig


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


@dataclass(frozen=True, kw_only=True)
class ToolUseConfig(ChatConfig):
    """An agent that calls tools."""

    format: Literal["hermes", "llama_json", "auto"] = opt(
        "auto",
        'format of tool calls; llama_json: a bare {"name": …, "parameters": {…}}; auto: the format '
        "of the model's family, by its chat template; hermes if it shows none",
    )


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig(ChatConfig):
    """An agent that writes its reasoning before each answer."""

    begin: str = opt("<think>", "tag before the reasoning")
    end: str = opt("</think>", "tag after the reasoning; the answer follows it")
    keep: Literal["all", "last", "none"] = opt(
        "all", "reasoning of earlier turns in the next prompt; removing it starts a new segment"
    )


@dataclass(frozen=True, kw_only=True)
class ScriptedConfig:
    """An agent without a model."""

    policy: Literal["answers", "random", "first"] = opt(
        "answers", "answers: a fixed list; random, first: one of the choices of the observation"
    )
    answers: list[str] = sub(list, "policy=answers: one answer a turn, repeated from the first")
    seed: int = opt(0, "seed of policy=random")


@dataclass(frozen=True, kw_only=True)
class FixedPolicyConfig(ChatConfig):
    """An agent that uses another model, which is not trained."""

    server: str = opt("", "EXPERIMENT/TRIAL of the launch_llm_server that serves this model")
    model_path: str | None = opt(None, "folder of that server's model; null: model.path")
    base_url: str = opt("", "OpenAI-style URL instead of `server`, like http://127.0.0.1:8000/v1")
    model: str = opt("default", "model name at base_url")
    api_key_env: str | None = opt(None, "environment variable with the API key of base_url")
    timeout_s: float = opt(120.0, "timeout of one request to base_url", above=0)
    retries: int = opt(3, "retries of a failed request to base_url", at_least=0)
    connections: int = opt(64, "concurrent requests of one worker to base_url", at_least=1)
    sampling: SamplingConfig = sub(SamplingConfig, "sampling of this model's tokens")
