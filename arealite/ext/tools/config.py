"""Options of the tools environment and of the built-in tools."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import Package, named, opt, sub
from arealite.api.reward import RewardConfig
from arealite.base.extras import extra_requirement
from arealite.ext.sandbox.config import SandboxConfig


@dataclass(frozen=True, kw_only=True)
class PythonToolConfig:
    """Options of the tool that runs Python programs. Each call runs a new program."""

    backend: Literal["sandbox", "monty"] = opt(
        "sandbox", "monty: a subset of Python, a hundred times faster (extra `tools`)"
    )
    sandbox: SandboxConfig = sub(SandboxConfig, "limits; with monty at most 64 MB of memory")


@dataclass(frozen=True, kw_only=True)
class SearchToolConfig:
    """Options of the tool that searches documents in memory."""

    path: str = opt("", "a JSONL file of {id, title, text}, or a folder of .txt and .md files")
    top_k: int = opt(3, "documents in a search result", at_least=1)
    excerpt_words: int = opt(30, "words of each document's excerpt", at_least=1, at_most=64)


@dataclass(frozen=True, kw_only=True)
class FilesToolConfig:
    """Options of the tool that gives each episode a folder."""

    max_files: int = opt(32, "largest number of files of an episode", at_least=1)
    max_kb: int = opt(64, "largest size of a file", at_least=1)


@dataclass(frozen=True, kw_only=True)
class MCPServerConfig:
    """A server of the Model Context Protocol. Each worker has one session with it."""

    command: list[str] = sub(list, "command of a server that uses stdin and stdout")
    url: str = opt("", "URL of a running server (streamable HTTP), instead of `command`")
    env: dict[str, str] = sub(dict, "environment of `command`; $NAME is the worker's variable")
    tools: list[str] = sub(list, "the server's tools to use; []: all")
    start_timeout_s: float = opt(30.0, "timeout until the server has listed its tools", above=0)
    concurrency: int = opt(16, "concurrent calls of one rollout worker", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ToolsRewardConfig:
    """Weights of the parts of the reward. Each part is between 0 and 1."""

    correct: float = opt(1.0, "weight of the reward function's score", above=float("-inf"))
    tool: float = opt(0.0, "weight of calling the tools in extra_info.tools", above=float("-inf"))
    format: float = opt(0.0, "weight of well-formed calls", above=float("-inf"))
    efficiency: float = opt(0.0, "weight of a right answer with few calls", above=float("-inf"))


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Generated arithmetic tasks."""

    operands: int = opt(2, "numbers in a task", at_least=2, at_most=8)
    digits: int = opt(3, "digits of each number", at_least=1, at_most=12)
    operators: str = opt("+-*", "operators to draw from")
    easy: float = opt(0.0, "share of sums below ten, which need no tool", at_least=0, at_most=1)
    prompt: str = opt("What is {}?", "prompt; {} is the task")


@dataclass(frozen=True, kw_only=True)
class ToolsEnvConfig:
    """The environment whose tasks are solved with tools."""

    tools: list[str] = named("tool", lambda: ["calculator"], "registered names of the tools")
    mcp: dict[str, MCPServerConfig] = sub(dict, "MCP servers, by names of your choice")
    max_turns: int = opt(8, "turns after which the episode ends", at_least=1)
    max_calls: int = opt(8, "concurrent calls of one turn; further calls fail", at_least=1)
    timeout_s: float = opt(20.0, "timeout of one call", above=0)
    answer_chars: int = opt(2000, "longest result of a call; the rest is cut", at_least=1)
    reward: RewardConfig = sub(RewardConfig, "reward function of the last answer")
    weights: ToolsRewardConfig = sub(ToolsRewardConfig, "weights of the parts of the reward")
    arithmetic: ArithmeticConfig = sub(ArithmeticConfig, "tasks of dataset.train=generated")
    python: PythonToolConfig = sub(PythonToolConfig, "options of the tool python")
    search: SearchToolConfig = sub(SearchToolConfig, "options of the tool search")
    files: FilesToolConfig = sub(FilesToolConfig, "options of the tool files")

    def packages(self) -> Iterator[Package]:
        """Yield the packages of the MCP servers and of the tools."""
        tools = extra_requirement("tools")
        if self.mcp:
            yield Package("mcp", tools, "mcp")
        if "python" in self.tools and self.python.backend == "monty":
            yield Package("pydantic_monty", tools, "python.backend=monty")
