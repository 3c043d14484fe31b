"""Converts messages and items of the history, in the forms of all APIs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec

from arealite.api.observation import ChatMessage
from arealite.ext.gateway.request_data import ApiError, assistant, function_call
from arealite.system.data.forms import template_role

TEXTS = {"text", "input_text", "output_text", "summary_text", "reasoning_text"}
NOT_TEXTS = ("thinking", "redacted_thinking", "tool_use")
"""Other parts of an answer."""


class MessageItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message, an item or a part of a content. An API uses some of the fields."""

    type: str = "message"
    role: str = ""
    content: str | list[MessageItem] | None = None
    text: str = ""
    thinking: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    summary: list[MessageItem] | None = None
    tool_calls: list[MessageItem] | None = None
    function: MessageItem | None = None
    id: str | None = None
    call_id: str = ""
    tool_call_id: str = ""
    tool_use_id: str = ""
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] = ""
    input: dict[str, Any] | None = None
    output: str | list[MessageItem] | None = None
    function_call: None = None
    audio: None = None


ITEM = msgspec.json.Decoder(MessageItem)
_arguments = msgspec.json.Decoder(dict[str, Any])


def decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    """Decode JSON of a client.

    Raises:
        ApiError: 400: the JSON is invalid.
    """
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"invalid request: {error}. See /openapi.json", "invalid") from error


def messages(item: bytes) -> Iterable[ChatMessage]:
    """Convert one item of the history, in the form of any API, to messages of chat templates.

    `content` is a text. A message of the assistant may have `reasoning_content` and `tool_calls`
    (arguments are objects); a message of role "tool" has `tool_call_id`. Neighbouring messages of
    the assistant are merged by the caller.

    Raises:
        ApiError: 400: the item is invalid, or has an image or a file.
    """
    parsed: MessageItem = decode(ITEM, item)
    match parsed.type, parsed.role:
        case "message", "assistant":
            return [_assistant(parsed)]
        case "message", "tool":
            result = _tool_result(parsed.tool_call_id, parsed.content)
            return [_named(result, parsed.name)]
        case "message", "system" | "developer" | "user":
            split_messages = _texts_and_results(parsed)
            return [_named(message, parsed.name) for message in split_messages]
        case "reasoning", _:
            thought = _join_texts(parsed.content or parsed.summary)
            return [_assistant(MessageItem(reasoning=thought))] if thought else []
        case "function_call", _:
            call = MessageItem(id=parsed.call_id, function=parsed)
            return [_assistant(MessageItem(tool_calls=[call]))]
        case "function_call_output", _:
            return [_tool_result(parsed.call_id, parsed.output)]
    raise ApiError(
        400,
        f"an item of type '{parsed.type}' and role '{parsed.role}' is not supported. "
        "Send messages, reasoning, and calls of functions.",
        "unsupported",
    )


def _named(message: ChatMessage, name: str | None) -> ChatMessage:
    """Return a message with the name of its author, if the item has one."""
    return {**message, "name": name} if name else message


def _assistant(item: MessageItem) -> ChatMessage:
    """Return a message of the assistant. Texts of one answer are joined without a separator."""
    parts = _parts(item.content)
    calls = [part for part in parts if part.type == "tool_use"]
    calls += item.tool_calls or []
    texts = [part for part in parts if part.type not in NOT_TEXTS]
    content = _join_texts(texts, separator="")
    thought = "".join(part.thinking for part in parts)
    thought = thought or item.reasoning_content or item.reasoning or ""
    return assistant(content, thought, [_call(call) for call in calls])


def _texts_and_results(item: MessageItem) -> Iterator[ChatMessage]:
    """Yield a message for each tool result, and one for texts between results."""
    role = template_role(item.role)
    parts = _parts(item.content)
    for is_result, group in groupby(parts, lambda part: part.type == "tool_result"):
        if is_result:
            for part in group:
                yield _tool_result(part.tool_use_id, part.content)
        else:
            yield {"role": role, "content": _join_texts([*group])}


def _parts(content: str | list[MessageItem] | None) -> list[MessageItem]:
    if isinstance(content, str):
        return [MessageItem(type="text", text=content)]
    return content or []


def _join_texts(content: str | list[MessageItem] | None, *, separator: str = "\n") -> str:
    parts = _parts(content)
    unsupported_types = {part.type for part in parts} - TEXTS
    if unsupported_types:
        raise ApiError(
            400,
            f"content of type '{unsupported_types.pop()}' is not supported: send text",
            "unsupported",
        )
    return separator.join([part.text for part in parts])


def _tool_result(call_id: str, content: str | list[MessageItem] | None) -> ChatMessage:
    return {
        "role": "tool",
        "content": _join_texts(content),
        "tool_call_id": call_id,
    }


def _call(call: MessageItem) -> dict[str, Any]:
    """Return a tool call with decoded arguments."""
    function = call.function or call
    if not function.name:
        raise ApiError(400, f"tool call '{call.id}' is no call of a named function", "unsupported")
    name = function.name
    if function.namespace:
        name = f"{function.namespace}__{name}"
    arguments = function.input or function.arguments or {}
    if isinstance(arguments, str):
        arguments = decode(_arguments, arguments.encode())
    return function_call(call.id or "", name, arguments)
