"""Requests, errors, events and blocks of answers that several APIs have."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from arealite.base.files import read_toml
from arealite.ext.gateway.apis.past_messages import decode
from arealite.ext.gateway.request_data import ApiError, ChatRequest, Delta, ParsedAnswer, ParsedCall

FIELDS = read_toml(__file__, "fields.toml")
"""The fields that are refused, by reason, and their values that are not."""
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors by status."""
MAX_PARTS = 2**17
"""Largest number of brackets and braces of a body. Each list or object of it costs CPU time."""
LINE_SEPARATORS = {
    b"\n": b" ",
    b"\r": b" ",
    b"\xc2\x85": b"\\u0085",
    b"\xe2\x80\xa8": b"\\u2028",
    b"\xe2\x80\xa9": b"\\u2029",
}
"""Replacements of characters in JSON at which `str.splitlines` splits, in UTF-8."""
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Meta(max_length=64)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Deltas = AsyncIterator[Delta]
Events = AsyncIterator[bytes]
dumps = msgspec.json.encode


class ToolFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool or a `tool_choice`, in the forms of all APIs."""

    type: str = ""
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None
    function: "ToolFields | None" = None
    tools: "list[ToolFields] | None" = None
    """Tools of a namespace."""
    disable_parallel_tool_use: bool = False


class RequestBody(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of requests."""

    model: str = ""
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: PositiveCount | None = None
    stop: Stop | Stops | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logprobs: bool | int | None = None
    tools: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    tool_choice: str | ToolFields | None = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None


class Api(ABC):
    """One HTTP API: its request and answer bodies, its events and, as OpenAI's, its errors."""

    request_type: type[RequestBody]
    """Type of the request's body, also for its JSON schema."""
    keep_alive = b": keep-alive\n\n"
    """Sent while a stream has no other events."""
    function_type = "function"
    """Type of a tool that the client runs."""

    def __init__(self) -> None:
        self._refused: list[tuple[str, str]] = []
        """Fields that are refused, by path, and the reasons."""
        for api_name in ("all", type(self).__name__):
            for reason, paths in FIELDS["refused"][api_name].items():
                self._refused += [(path, reason) for path in paths]
        names = [path.partition(".")[0] for path, _ in self._refused]
        fields = [(name, Any, None) for name in names]
        body_type = msgspec.defstruct(
            "RequestBody",
            fields,
            bases=(self.request_type,),
            frozen=True,
        )
        self._decoder = msgspec.json.Decoder(body_type)

    def decode(self, body_json: bytes) -> ChatRequest:
        """Decode a request.

        Raises:
            ApiError: 400: the body is invalid, or has a field that would change the answer; 413: it
                has too many lists and objects.
        """
        _check_number_of_parts(body_json)
        body = decode(self._decoder, body_json)
        self._check_refused(body)
        tools = read_tools(body.tools, self.function_type)
        is_single = getattr(body.tool_choice, "disable_parallel_tool_use", False)
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        fields: dict[str, Any] = {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tools": [schema for schema, *_ in tools.values()],
            "tool_choice": read_choice(body.tool_choice, tools),
            "is_parallel": body.parallel_tool_calls is not False and not is_single,
            "is_stream": bool(body.stream),
            "logprobs": bool(body.logprobs),
            "n": body.n or 1,
            "stop": tuple(stops),
        }
        return ChatRequest(options=body, **fields | self.read(body))

    def _check_refused(self, body: RequestBody) -> None:
        """Check that a body has no field that would change the answer.

        Raises:
            ApiError: 400: the body has such a field.
        """
        for path, reason in self._refused:
            name, _, inner_name = path.partition(".")
            setting = getattr(body, name)
            if inner_name and isinstance(setting, dict):
                setting = setting.get(inner_name)
            if setting and setting != FIELDS["neutral"].get(path):
                raise ApiError(400, f"{path} is not supported: remove it. {reason}", "unsupported")

    @abstractmethod
    def read(self, body: Any) -> dict[str, Any]:
        """Return the fields of a request that this API has in a form of its own.

        Raises:
            ApiError: 400: the body asks for something that cannot be done.
        """

    @abstractmethod
    def encode(self, request: ChatRequest, answers: list[ParsedAnswer], model: str) -> bytes:
        """Return the body of the answers (`request.n`)."""

    @abstractmethod
    def events(
        self,
        request: ChatRequest,
        deltas: Deltas,
        model: str,
        id: str,
    ) -> Events:
        """Yield the server-sent events of a stream, each with its blank line.

        Args:
            request: The request.
            deltas: The deltas of all answers; the last one of each answer has kind "end".
            model: Name of the model.
            id: `ParsedAnswer.id` of answer 0, which the first event needs.
        """

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        return sse(self.error(error))

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error."""
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        return {
            "error": {
                "type": ERRORS.get(error.status, kind),
                "message": error.message,
                "param": None,
                "code": error.code or None,
            }
        }


def _check_number_of_parts(body_json: bytes) -> None:
    """Check that a body has few enough lists and objects."""
    count = body_json.count(b"{") + body_json.count(b"[")
    if count > MAX_PARTS:
        raise ApiError(413, f"the body has {count} brackets and braces; at most {MAX_PARTS}")


NamedTools = dict[str, tuple[dict[str, Any], str | None, str]]
"""Schema of a function, its namespace and its name there, by its name in the schema."""
_decoder = msgspec.json.Decoder(list[ToolFields] | None)


def read_tools(raw: Raw, function_type: str) -> NamedTools:
    """Convert tools to OpenAI's function schemas. The caller must not change them."""
    tools_json = bytes(raw)
    convert = _tools if len(tools_json) < 2**18 else _tools.__wrapped__
    return convert(tools_json, function_type)


@lru_cache(maxsize=32)
def _tools(tools_json: bytes, function_type: str) -> NamedTools:
    tools: NamedTools = {}
    for outer in decode(_decoder, tools_json) or ():
        namespace = outer.name if outer.type == "namespace" else None
        entries = [outer] if namespace is None else outer.tools or []
        for entry in entries:
            tool = entry.function or entry
            if entry.type not in ("", function_type):
                raise ApiError(
                    400,
                    f"tool '{tool.name}' of type '{entry.type}' is no function that the client "
                    "runs. Turn it off in the client",
                    "unsupported",
                )
            if not tool.name:
                raise ApiError(400, f"tool {len(tools)} has no name. Name each function", "invalid")
            name = tool.name if namespace is None else f"{namespace}__{tool.name}"
            tools[name] = _schema(name, tool), namespace, tool.name
    return tools


def _schema(name: str, tool: ToolFields) -> dict[str, Any]:
    """Return OpenAI's schema of a function."""
    function: dict[str, Any] = {"name": name}
    if tool.description:
        function["description"] = tool.description
    no_parameters = {"type": "object", "properties": {}}
    function["parameters"] = tool.parameters or tool.input_schema or no_parameters
    return {"type": "function", "function": function}


def read_choice(choice: str | ToolFields | None, tools: Iterable[str]) -> str:
    """Convert a `tool_choice` to the form of ChatRequest."""
    if not isinstance(choice, ToolFields):
        chosen = choice or "auto"
    elif choice.type in ("function", "tool"):
        function = choice.function or choice
        chosen = f"={function.name}"
    else:
        chosen = choice.type
    if chosen == "any":
        chosen = "required"
    forced = [f"={name}" for name in tools]
    possible = ["auto", "none", *forced]
    if forced:
        possible.append("required")
    if chosen not in possible:
        raise ApiError(
            400,
            f"tool_choice '{chosen.lstrip('=')}' is not possible. "
            "Use auto, none, required, or the name of a function in tools",
        )
    return chosen


def message(role: str, content: object) -> list[bytes]:
    """Return a message as an item of the history; [] without content."""
    return [dumps({"role": role, "content": content})] if content else []


def sampled(*answers: ParsedAnswer) -> int:
    """Return the number of sampled tokens."""
    responses = [answer.response for answer in answers if answer.response]
    return sum([len(response.output_ids) for response in responses])


def sse(fields: dict[str, Any]) -> bytes:
    """Return a server-sent event; its name is the type in its fields.

    Clients that split lines as `str.splitlines` does must see one line.
    """
    line = dumps(fields)
    for separator, replacement in LINE_SEPARATORS.items():
        line = line.replace(separator, replacement)
    if "type" not in fields:
        return b"data: %b\n\n" % line
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), line)


class Block(msgspec.Struct, kw_only=True):
    """One thought, text or call of an answer."""

    kind: str
    """As of Delta; "" if no block is open."""
    index: int = 0
    call: ParsedCall | None = None
    parts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments."""
        return "".join(self.parts)


def blocks_of(answer: ParsedAnswer) -> list[Block]:
    """Return the blocks of a whole answer. One without calls has a text, which may be empty."""
    blocks = list[Block]()
    if answer.thought:
        blocks.append(Block(kind="thought", parts=[answer.thought]))
    if answer.text or not answer.calls:
        blocks.append(Block(kind="text", parts=[answer.text]))
    for call in answer.calls:
        block = Block(kind="call", call=call, parts=[call.arguments])
        blocks.append(block)
    for index, block in enumerate(blocks):
        block.index = index
    return blocks


async def steps(deltas: Deltas) -> AsyncIterator[tuple[str, Block, Delta]]:
    """Yield the steps of an answer: "added", "delta" and "done" of each block, and the "end"."""
    block = Block(kind="")
    async for delta in deltas:
        is_next_block = delta.call is not None or delta.kind != block.kind
        if block.kind and is_next_block:
            yield "done", block, delta
            block = Block(kind="", index=block.index + 1)
        if delta.answer:
            yield "end", block, delta
            return
        if not block.kind:
            block.kind = delta.kind
            block.call = delta.call
            yield "added", block, delta
        part = delta.call.arguments if delta.call else delta.text
        block.parts.append(part)
        yield "delta", block, delta
