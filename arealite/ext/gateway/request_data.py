"""The data between the parts of the gateway: one request and its answers, the same for each API.

`apis` converts HTTP bodies to ChatRequests and answers to HTTP bodies. `conversation` converts a
ChatRequest to a prompt. `parser` converts sampled tokens to Deltas and a ParsedAnswer.
"""

from typing import Any, Literal

import msgspec

from arealite.api.llm import LLMResponse
from arealite.api.observation import ChatMessage

StopReason = Literal["stop", "stop_string", "calls", "length"]
"""Why an answer ended: at the end of its turn or at a stop string, with calls, or at a limit."""


class ApiError(Exception):
    """A request that is refused. Each API has its own form for it.

    Args:
        status: HTTP status.
        message: What is wrong, and the fix.
        code: Machine-readable name, such as "context_length_exceeded".
    """

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for answers."""

    items: list[bytes]
    """The history as the client sent it: JSON of each message or item, in its API's form. The
    system prompt comes first."""
    prompt: str | list[int] | None = None
    """Text or tokens of /v1/completions, which has no messages."""
    previous: str = ""
    """`ParsedAnswer.id` whose conversation the items continue; "": they are the whole history."""
    tools: list[dict[str, Any]] = []
    """OpenAI function schemas: {"type": "function", "function": {"name", …}}."""
    tool_choice: str = "auto"
    """"auto", "none", "required", or "=NAME" for the tool that must be called."""
    is_parallel: bool = True
    """False: at most one tool call; further calls are text."""
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    is_stream: bool = False
    logprobs: bool = False
    options: Any = None
    """The decoded body, for the API that made the request."""


def function_call(id: object, name: object, arguments: object) -> dict[str, Any]:
    """Return a tool call in the form of chat templates and OpenAI."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str, thought: str, calls: list[dict[str, Any]]) -> ChatMessage:
    """Return a message of the assistant in the form of chat templates."""
    message: ChatMessage = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in an answer."""

    id: str = ""
    name: str = ""
    arguments: str = "{}"
    """JSON of an object, as sampled if it is JSON there."""
    error: str = ""
    """Why the call cannot be read, while the answer is parsed; "" for a valid call."""
    raw: str = ""
    """Text of the call with its markers, while the answer is parsed."""


class ParsedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed answer."""

    id: str
    """Unique id of the answer: letters and digits."""
    thought: str
    """Text of the thought without its markers; "" without one."""
    text: str
    """Text without thoughts, calls, the stop string and the token that ended the turn."""
    calls: tuple[ParsedCall, ...]
    stop_reason: StopReason
    stop_string: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """`Origin.reused` of the prompt."""
    response: LLMResponse | None = None
    tokens: tuple[str, ...] = ()
    """Text of each sampled token. The parser fills it where the request asks for logprobs."""
    malformed: int = 0
    """Number of calls that could not be read and are part of the text."""

    def message(self) -> ChatMessage:
        """Return the answer as a message in the form of chat templates."""
        calls = [
            function_call(call.id, call.name, msgspec.json.decode(call.arguments))
            for call in self.calls
        ]
        return assistant(self.text, self.thought, calls)


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a streamed answer. The deltas of a kind add up to the field of the ParsedAnswer."""

    kind: Literal["thought", "text", "call", "end"]
    text: str = ""
    call: ParsedCall | None = None
    """A whole call, with kind "call"."""
    answer: ParsedAnswer | None = None
    """The whole answer, with kind "end"."""
    index: int = 0
    """Number of the answer, below `ChatRequest.n`."""
