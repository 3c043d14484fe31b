"""A tool is a function that agents may call: its schema, and what it answers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from arealite.api.fields import opt, sub
from arealite.api.reward import RewardConfig
from arealite.api.sandbox import SandboxConfig
from arealite.api.task import Task
from arealite.base.registry import Registry


@dataclass(frozen=True, kw_only=True)
class PythonToolConfig:
    """Programs that the agent writes; each call is one of its own."""

    backend: Literal["sandbox", "monty"] = opt(
        "sandbox", "monty: a subset of Python, a hundred times faster (extra `tools`)"
    )
    sandbox: SandboxConfig = sub(SandboxConfig, "limits; monty's memory is 64 MB at most")


@dataclass(frozen=True, kw_only=True)
class SearchToolConfig:
    """A knowledge base, kept in memory."""

    path: str = opt("", "a JSONL file of {id, title, text}, or a folder of .txt and .md files")
    top_k: int = opt(3, "documents that a search names", at_least=1)
    excerpt_words: int = opt(30, "of each of them", at_least=1, at_most=64)


@dataclass(frozen=True, kw_only=True)
class FilesToolConfig:
    """A folder that an episode has for itself."""

    max_files: int = opt(32, "files of an episode", at_least=1)
    max_kb: int = opt(64, "size of a file", at_least=1)


@dataclass(frozen=True, kw_only=True)
class MCPServerConfig:
    """A server of the Model Context Protocol; a worker has one session with it."""

    command: list[str] = sub(list, "starts it, speaking on stdin and stdout")
    url: str = opt("", "of one that runs, by streamable HTTP, instead of `command`")
    env: dict[str, str] = sub(dict, "variables of `command`; $NAME in them is the worker's")
    tools: list[str] = sub(list, "those of its tools that agents are offered; []: all")
    start_timeout_s: float = opt(30.0, "until it has told its tools", above=0)
    concurrency: int = opt(16, "calls of one rollout worker at a time", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ToolsRewardConfig:
    """What each part of the reward, 0 to 1, is worth."""

    correct: float = opt(1.0, "the answer, by the reward function", above=float("-inf"))
    tool: float = opt(0.0, "the tools of extra_info.tools called", above=float("-inf"))
    format: float = opt(0.0, "calls that could be read and made", above=float("-inf"))
    efficiency: float = opt(0.0, "a right answer with few calls", above=float("-inf"))


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Tasks that the environment makes."""

    operands: int = opt(2, "numbers of a task", at_least=2, at_most=8)
    digits: int = opt(3, "of each number", at_least=1, at_most=12)
    operators: str = opt("+-*", "drawn from these")
    easy: float = opt(0.0, "share of sums below ten, which need no tool", at_least=0, at_most=1)
    prompt: str = opt("What is {}?", "with {} for the task")


@dataclass(frozen=True, kw_only=True)
class ToolsEnvConfig:
    """A task solved with tools."""

    tools: list[str] = sub(lambda: ["calculator"], "names in the table of tools")
    mcp: dict[str, MCPServerConfig] = sub(dict, "servers by names of your choice, for their tools")
    max_turns: int = opt(8, "an agent that still calls tools then is stopped", at_least=1)
    max_calls: int = opt(8, "of one turn, made at the same time; more are refused", at_least=1)
    timeout_s: float = opt(20.0, "of one call", above=0)
    answer_chars: int = opt(2000, "of a tool's answer; the rest is cut", at_least=1)
    reward: RewardConfig = sub(RewardConfig, "how the last answer is scored")
    weights: ToolsRewardConfig = sub(ToolsRewardConfig, "of the parts of the reward")
    arithmetic: ArithmeticConfig = sub(ArithmeticConfig, "tasks of dataset.train=generated")
    python: PythonToolConfig = sub(PythonToolConfig, "options of the tool python")
    search: SearchToolConfig = sub(SearchToolConfig, "options of the tool search")
    files: FilesToolConfig = sub(FilesToolConfig, "options of the tool files")


class ToolError(Exception):
    """A call failed for a reason that the agent should be told; its text is the tool's answer."""


class Tool(ABC):
    """One instance a worker, for all its episodes; what an episode keeps is in its `state`."""

    schema: dict[str, Any]
    """OpenAI function schema: {"type": "function", "function": {name, description, parameters}}."""
    deterministic: bool = False
    """Whether the same calls of an episode, made again in a new one, are answered the same."""

    def __init__(self, config: Any) -> None:
        self.config = config
        """This tool's own config, None where it has none."""
        self.slots = asyncio.Semaphore(64)
        """How many calls are made at a time; waiting for a slot takes nothing of a call's time."""

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Start what is shared and costly."""

    async def begin(self, task: Task, state: dict[str, Any]) -> None:  # noqa: B027  (optional hook)
        """Prepare an episode's `state`."""

    @abstractmethod
    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Return the answer to a call, whose arguments keep to the schema; `state` is the tool's.

        Raises:
            ToolError: what the agent is told instead.
        """

    async def end(self, state: dict[str, Any]) -> None:  # noqa: B027  (optional hook)
        """Give back what an episode's calls left in `state`."""

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Stop what `setup` started."""


tools: Registry[Tool] = Registry(
    "tool",
    {
        "calculator": "arealite.impl.tool.calculator:CalculatorTool",
        "python": "arealite.impl.tool.python:PythonTool",
        "search": "arealite.impl.tool.search:SearchTool",
        "files": "arealite.impl.tool.files:FilesTool",
    },
)


def function(
    name: str, description: str, /, *, required: tuple[str, ...] = (), **properties: Any
) -> Any:
    """Return an OpenAI function schema; each property is a JSON schema."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    metadata = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": metadata}
