"""Converts messages and items of the history, in the forms of all APIs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec

from arealite.api.observation import ChatMessage
from arealite.impl.gateway.exchange import ApiError, assistant, function_call
from arealite.system.data.forms import template_role

TEXTS = {"text", "input_text", "output_text", "summary_text", "reasoning_text"}
THOUGHTS = ("thinking", "redacted_thinking")


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message, an item or a part of a content. An API uses some of the fields."""

    type: str = "message"
    role: str = ""
    content: str | list[Item] | None = None
    text: str = ""
    thinking: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    summary: list[Item] | None = None
    tool_calls: list[Item] | None = None
    function: Item | None = None
    id: str | None = None
    call_id: str = ""
    tool_call_id: str = ""
    tool_use_id: str = ""
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] = ""
    input: dict[str, Any] | None = None
    output: str | list[Item] | None = None
    function_call: None = None
    audio: None = None


ITEM = msgspec.json.Decoder(Item)
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
    each: Item = decode(ITEM, item)
    name: ChatMessage = {"name": each.name} if each.name else {}
    match each.type, each.role:
        case "message", "assistant":
            return [_assistant(each)]
        case "message", "tool":
            return [_result(each.tool_call_id, each.content) | name]
        case "message", "system" | "developer" | "user":
            return [message | name for message in _others(each)]
        case "reasoning", _:
            thought = _text(each.content or each.summary)
            return [_assistant(Item(reasoning=thought))] if thought else []
        case "function_call", _:
            return [_assistant(Item(tool_calls=[Item(id=each.call_id, function=each)]))]
        case "function_call_output", _:
            return [_result(each.call_id, each.output)]
    what = f"an item of type '{each.type}' and role '{each.role}' is not supported"
    raise ApiError(400, f"{what}. Send messages, reasoning, and calls of functions.", "unsupported")


def _assistant(each: Item) -> ChatMessage:
    """Return a message of the assistant. Texts of one answer are joined without a separator."""
    parts = _parts(each.content)
    thought = "".join([part.thinking for part in parts])
    calls = [part for part in parts if part.type == "tool_use"] + (each.tool_calls or [])
    text = _text([part for part in parts if part.type not in ("tool_use", *THOUGHTS)], glue="")
    thought = thought or each.reasoning_content or each.reasoning or ""
    return assistant(text, thought, [*map(_call, calls)])


def _others(each: Item) -> Iterator[ChatMessage]:
    """Yield a message for each tool result, and one for texts between results."""
    role = template_role(each.role)
    for is_result, group in groupby(_parts(each.content), lambda part: part.type == "tool_result"):
        if is_result:
            yield from [_result(part.tool_use_id, part.content) for part in group]
        else:
            yield {"role": role, "content": _text([*group])}


def _parts(content: str | list[Item] | None) -> list[Item]:
    return [Item(type="text", text=content)] if isinstance(content, str) else content or []


def _text(content: str | list[Item] | None, *, glue: str = "\n") -> str:
    parts = _parts(content)
    if others := {part.type for part in parts} - TEXTS:
        what = f"content of type '{others.pop()}' is not supported: send text"
        raise ApiError(400, what, "unsupported")
    return glue.join([part.text for part in parts])


def _result(call_id: str, content: str | list[Item] | None) -> ChatMessage:
    return {"role": "tool", "content": _text(content), "tool_call_id": call_id}


def _call(call: Item) -> dict[str, Any]:
    """Return a tool call with decoded arguments."""
    function = call.function or call
    arguments = function.input or function.arguments or {}
    if not function.name:
        raise ApiError(400, f"tool call '{call.id}' is no call of a named function", "unsupported")
    if isinstance(arguments, str):
        arguments = decode(_arguments, arguments.encode())
    name = f"{function.namespace}__{function.name}" if function.namespace else function.name
    return function_call(call.id or "", name, arguments)
