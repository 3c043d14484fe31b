"""Checks chat messages of rows, and prepares them for chat templates."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import msgspec

from arealite.base.errors import UserError


def check_prompt(prompt: object, where: str, column: str = "prompt") -> str | list[dict[str, Any]]:
    """Return the value of a column if it is a text or a list of messages.

    A message with `tool_calls` needs no content.

    Raises:
        UserError: it is neither, or empty.
    """
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_message, cast(list[object], prompt))):
        return cast(list[dict[str, Any]], prompt)
    raise UserError(
        f"{where}: `{column}` must be a text that is not empty, or a list of messages. "
        'Write "…" or [{"role": "user", "content": "…"}].'
    )


def _is_message(value: object) -> bool:
    message = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    content, calls = message.get("content"), message.get("tool_calls")
    has_calls = content is None and isinstance(calls, list) and calls != []
    return isinstance(message.get("role"), str) and (isinstance(content, str) or has_calls)


def tool_calls(message: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a message; [] without any."""
    return message.get("tool_calls") or []


def for_template(message: Any) -> dict[str, Any]:
    """Return a message as templates expect it: arguments of tool calls as objects, not as JSON
    text (OpenAI), and without the null values that Parquet adds."""
    message = {
        key: value for key, value in message.items() if value is not None or key == "content"
    }
    if not (calls := tool_calls(message)):
        return message
    return message | {"tool_calls": [_without_nulls(each) for each in calls]}


def _without_nulls(value: Any, key: str = "") -> Any:
    if key == "arguments" and isinstance(value, str):
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(value)
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {name: _without_nulls(each, name) for name, each in items if each is not None}
    is_list = isinstance(value, list)
    return [_without_nulls(each) for each in cast(list[Any], value)] if is_list else value
