"""Finds AReaLite's columns in chat rows of other libraries: ShareGPT."""

from contextlib import suppress
from typing import Any, cast

import msgspec

from arealite.ext.offline.tool_schemas import is_schema
from arealite.system.data.forms import DatasetRow

CHAT = ("tokens", "messages", "prompt", "completion", "chosen", "rejected")
"""Columns of a row of sft, dpo and reward."""
ROLES = {"human": "user", "observation": "tool", "function_response": "tool"} | {
    name: "assistant" for name in ("gpt", "chatgpt", "bing")
}
"""Role of a chat message by ShareGPT's `from`; other values are roles already."""


def chat_row(row: DatasetRow) -> DatasetRow:
    """Return a row of sft, dpo or reward with AReaLite's columns; ShareGPT's are converted."""
    if row.get("conversations") is None or any(map(row.get, CHAT[:3])):
        return row
    conversation: list[Any] = [row["conversations"]]
    if row.get("system"):
        conversation.insert(0, {"from": "system", "value": row["system"]})
    answers = DatasetRow()
    for name in ("chosen", "rejected"):
        if isinstance(row.get(name), dict | list):
            answers[name] = _from_sharegpt(row[name])
    is_pair = bool(answers) or "chosen" in row
    column = "prompt" if is_pair else "messages"
    return {**row, column: _from_sharegpt(conversation), **answers}


def chat_form(row: DatasetRow) -> str:
    """Return the name of the form of a row that `chat_row` has returned."""
    kind = "ShareGPT rows" if "conversations" in row else "rows"
    present = [name for name in CHAT if row.get(name) is not None]
    return f"{kind}: {'/'.join(present)}"


def _from_sharegpt(column: Any) -> list[Any]:
    """Convert one ShareGPT message or a list of them to chat messages; keep anything else."""
    if isinstance(column, list):
        elements = cast(list[Any], column)
        return [message for element in elements for message in _from_sharegpt(element)]
    if not isinstance(column, dict) or "from" not in column:
        return [column]
    message = cast(DatasetRow, column)
    role = str(message["from"])
    content = message.get("value")
    others = {key: field for key, field in message.items() if key not in ("from", "value")}
    calls = _sharegpt_calls(content) if role == "function_call" else []
    if calls:
        chat_message = {"role": "assistant", "content": None, "tool_calls": calls}
    else:
        chat_message = {"role": ROLES.get(role, role), "content": content}
    return [{**chat_message, **others}]


def _sharegpt_calls(content: object) -> list[DatasetRow]:
    """Return the tool calls in the JSON text of a ShareGPT message; [] if it has none."""
    decoded: Any = None
    if isinstance(content, str):
        with suppress(msgspec.DecodeError):
            decoded = msgspec.json.decode(content)
    functions = cast(list[Any], decoded) if isinstance(decoded, list) else [decoded]
    if not all(map(is_schema, functions)):
        return []
    return [{"type": "function", "function": function} for function in functions]
