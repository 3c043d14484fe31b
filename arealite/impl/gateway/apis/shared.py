"""Requests, errors, events and blocks of answers that several APIs have."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from arealite.base.data import read_toml
from arealite.impl.gateway.apis.history import decode
from arealite.impl.gateway.exchange import Answer, ApiError, Call, ChatRequest, Delta

FIELDS = read_toml(__file__, "fields.toml")
"""The fields that are refused, by reason, and their values that are not."""
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
ERRORS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
"""Types of errors by status."""
MAX_PARTS = 2**17
"""Largest number of brackets and braces of a body. Each list or object of it costs CPU time."""
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Meta(max_length=64)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Deltas = AsyncIterator[Delta]
Events = AsyncIterator[bytes]
dumps = msgspec.json.encode


class Tool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool or a `tool_choice`, in the forms of all APIs."""

    type: str = ""
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None
    function: "Tool | None" = None
    tools: "list[Tool] | None" = None
    """Tools of a namespace."""
    disable_parallel_tool_use: bool = False


class Body(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of requests."""

    model: str = ""
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Count | None = None
    stop: Stop | Stops | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logprobs: bool | int | None = None
    tools: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    tool_choice: str | Tool | None = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None


class Api(ABC):
    """One HTTP API: its request and answer bodies, its events and, as OpenAI's, its errors."""

    request_type: type[Body]
    """Type of the request's body, also for its JSON schema."""
    keep_alive = b": keep-alive\n\n"
    """Sent while a stream has no other events."""
    function_type = "function"
    """Type of a tool that the client runs."""

    def __init__(self) -> None:
        reasons = [FIELDS["refused"][api].items() for api in ("all", type(self).__name__)]
        self._refused = [(n.split("."), why) for why, names in chain(*reasons) for n in names]
        fields = [(path[0], Any, None) for path, _ in self._refused]
        body = msgspec.defstruct("Body", fields, bases=(self.request_type,), frozen=True)
        self._decoder = msgspec.json.Decoder(body)

    def decode(self, data: bytes) -> ChatRequest:
        """Decode a request.

        Raises:
            ApiError: 400: the body is invalid, or has a field that would change the answer; 413: it
                has too many lists and objects.
        """
        parts = data.count(b"{") + data.count(b"[") if len(data) > MAX_PARTS else 0
        if parts > MAX_PARTS:
            raise ApiError(413, f"the body has {parts} brackets and braces; at most {MAX_PARTS}")
        body = decode(self._decoder, data)
        for (name, *inner), why in self._refused:
            value = getattr(body, name)
            path = ".".join([name, *inner])
            value = value.get(*inner) if inner and isinstance(value, dict) else value
            if value and value != FIELDS["neutral"].get(path):
                raise ApiError(400, f"{path} is not supported: remove it. {why}", "unsupported")
        tools = read_tools(body.tools, self.function_type)
        names = ("max_tokens", "temperature", "top_p")
        made: dict[str, Any] = {name: getattr(body, name) for name in names}
        made["tools"] = [schema for schema, *_ in tools.values()]
        made["tool_choice"] = read_choice(body.tool_choice, tools)
        is_single = getattr(body.tool_choice, "disable_parallel_tool_use", False)
        made["is_parallel"] = body.parallel_tool_calls is not False and not is_single
        made |= {"is_stream": bool(body.stream), "logprobs": bool(body.logprobs), "n": body.n or 1}
        made["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return ChatRequest(options=body, **made | self.read(body))

    @abstractmethod
    def read(self, body: Any) -> dict[str, Any]:
        """Return the fields of a request that this API has in a form of its own.

        Raises:
            ApiError: 400: the body asks for something that cannot be done.
        """

    @abstractmethod
    def encode(self, request: ChatRequest, answers: list[Answer], model: str) -> bytes:
        """Return the body of the answers (`request.n`)."""

    @abstractmethod
    def events(self, request: ChatRequest, deltas: Deltas, model: str, id: str) -> Events:
        """Yield the server-sent events of a stream, each with its blank line.

        Args:
            request: The request.
            deltas: The deltas of all answers; the last one of each answer has kind "end".
            model: Name of the model.
            id: `Answer.id` of answer 0, which the first event needs.
        """

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        return sse(self.error(error))

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error."""
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        about = {"type": ERRORS.get(error.status, kind), "message": error.message}
        return {"error": {**about, "param": None, "code": error.code or None}}


Tools = dict[str, tuple[dict[str, Any], str | None, str]]
"""Schema of a function, its namespace and its name there, by its name in the schema."""
_decoder = msgspec.json.Decoder(list[Tool] | None)


def read_tools(raw: Raw, function_type: str) -> Tools:
    """Convert tools to OpenAI's function schemas. The caller must not change them."""
    data = bytes(raw)
    cached = _tools if len(data) < 2**18 else _tools.__wrapped__
    return cached(data, function_type)


@lru_cache(maxsize=32)
def _tools(data: bytes, function_type: str) -> Tools:
    tools: Tools = {}
    for outer in decode(_decoder, data) or ():
        space = outer.name if outer.type == "namespace" else None
        for each in [outer] if space is None else outer.tools or ():
            tool = each.function or each
            if each.type not in ("", function_type):
                what = f"tool '{tool.name}' of type '{each.type}' is no function that the client"
                raise ApiError(400, f"{what} runs. Turn it off in the client", "unsupported")
            if not tool.name:
                raise ApiError(400, f"tool {len(tools)} has no name. Name each function", "invalid")
            name = tool.name if space is None else f"{space}__{tool.name}"
            about = {"description": tool.description} if tool.description else {}
            schema = tool.parameters or tool.input_schema or {"type": "object", "properties": {}}
            function = {"name": name, **about, "parameters": schema}
            tools[name] = {"type": "function", "function": function}, space, tool.name
    return tools


def read_choice(choice: str | Tool | None, tools: Iterable[str]) -> str:
    """Convert a `tool_choice` to the form of ChatRequest."""
    chosen = choice.type if isinstance(choice, Tool) else choice or "auto"
    if isinstance(choice, Tool) and chosen in ("function", "tool"):
        chosen = f"={(choice.function or choice).name}"
    chosen = "required" if chosen == "any" else chosen
    possible = ["auto", "none", *["required" for _ in tools], *[f"={name}" for name in tools]]
    if chosen not in possible:
        fix = "Use auto, none, required, or the name of a function in tools"
        raise ApiError(400, f"tool_choice '{chosen.lstrip('=')}' is not possible. {fix}")
    return chosen


def message(role: str, content: object) -> list[bytes]:
    """Return a message as an item of the history; [] without content."""
    return [dumps({"role": role, "content": content})] if content else []


def sampled(*answers: Answer) -> int:
    """Return the number of sampled tokens."""
    return sum([len(answer.response.output_ids) for answer in answers if answer.response])


def sse(data: dict[str, Any]) -> bytes:
    """Return a server-sent event; its name is the data's type.

    Clients that split lines as `str.splitlines` does must see one line.
    """
    line = dumps(data).replace(b"\n", b" ").replace(b"\r", b" ").replace(b"\xc2\x85", b"\\u0085")
    line = line.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    name = f"event: {data['type']}\n" if "type" in data else ""
    return b"%bdata: %b\n\n" % (name.encode(), line)


class Block(msgspec.Struct):
    """One thought, text or call of an answer."""

    kind: str
    """As of Delta; "" if no block is open."""
    index: int = 0
    call: Call | None = None
    parts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments."""
        return "".join(self.parts)


def blocks_of(answer: Answer) -> Iterator[Block]:
    """Yield the blocks of a whole answer. One without calls has a text, which may be empty."""
    made = [("thought", None, answer.thought)] if answer.thought else []
    if answer.text or not answer.calls:
        made.append(("text", None, answer.text))
    made += [("call", call, call.arguments) for call in answer.calls]
    for index, (kind, call, text) in enumerate(made):
        yield Block(kind, index, call, [text])


async def steps(deltas: Deltas) -> AsyncIterator[tuple[str, Block, Delta]]:
    """Yield the steps of an answer: "added", "delta" and "done" of each block, and the "end"."""
    block = Block("")
    async for delta in deltas:
        if block.kind and (delta.call or delta.kind != block.kind):
            yield "done", block, delta
            block = Block("", block.index + 1)
        if delta.answer:
            yield "end", block, delta
            return
        if not block.kind:
            block.kind = delta.kind
            block.call = delta.call
            yield "added", block, delta
        block.parts.append(delta.call.arguments if delta.call else delta.text)
        yield "delta", block, delta
