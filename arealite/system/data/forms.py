"""Applies `dataset.columns` to rows; checks chat messages, and prepares them for templates."""

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec

from arealite.api.observation import is_message
from arealite.base.errors import UserError
from arealite.base.registry import unknown

TASK = ("prompt", "ground_truth", "extra_info")
"""Columns of a task."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's thought, in order of preference."""
PROMPTS = ("question", "problem", "instruction", "query", "input", "messages", "text")
"""Common names of the column with the prompt, for errors."""
DatasetRow = dict[str, Any]
Columns = Mapping[str, str]
"""dataset.columns."""
_json = msgspec.json.Encoder().encode


def renamed(
    row: DatasetRow,
    recognised: DatasetRow,
    columns: Columns,
    place: str,
    our_columns: Sequence[str] = TASK,
) -> DatasetRow:
    """Return a row with the columns that `dataset.columns` names.

    These names win over recognition. For a task, a name that is not in `our_columns` is added to
    `extra_info`.

    Args:
        row: The row of the file.
        recognised: The row with the recognised columns.
        columns: `dataset.columns`: names of the file's columns by our names. `a.b` is the value b
            in column a.
        place: The place of the row, for errors.
        our_columns: AReaLite's columns.

    Raises:
        UserError: the row does not have a column, or `columns` has a misspelled name.
    """
    renamed_row = {**recognised}
    extra = dict[str, object]()
    for name, path in columns.items():
        cell = _cell(row, path, name, place)
        if name == "ground_truth" and name in our_columns:
            renamed_row[name] = as_text(cell)
        elif name in our_columns:
            renamed_row[name] = cell
        elif our_columns is not TASK or _is_misspelled(name):
            raise UserError(unknown("key of dataset.columns", name, our_columns))
        else:
            extra[name] = cell
    extra_info: object = renamed_row.get("extra_info") or {}
    if extra and isinstance(extra_info, dict):
        renamed_row["extra_info"] = {**cast(DatasetRow, extra_info), **extra}
    return renamed_row


def _is_misspelled(name: str) -> bool:
    """Return whether a name is close to the name of a task's column."""
    return bool(difflib.get_close_matches(name, TASK, n=1, cutoff=0.75))


def _cell(
    row: DatasetRow,
    path: str,
    name: str,
    place: str,
) -> object:
    """Return the value that `dataset.columns.<name>=path` names.

    Raises:
        UserError: the row does not have it.
    """
    cell: Any = row
    for key in [path] if path in row else path.split("."):
        if not isinstance(cell, dict) or key not in cell:
            similar = difflib.get_close_matches(path, [*row], n=1)
            hint = f" Did you mean '{similar[0]}'?" if similar else ""
            raise UserError(
                f"{place}: no column `{path}` (dataset.columns.{name}), "
                f"only {', '.join(row) or 'none'}.{hint}"
            )
        cell = cast(DatasetRow, cell)[key]
    return cast(object, cell)


def no_prompt(names: Sequence[str], place: str) -> UserError:
    """Return the error for a row without a prompt; it names the file's columns and the fix."""
    likely = difflib.get_close_matches("prompt", names, n=1)
    likely += [name for name in PROMPTS if name in names]
    if likely:
        hint = (
            f"Did you mean '{likely[0]}'? "
            f"Rename it to `prompt`, or set dataset.columns.prompt={likely[0]}."
        )
    else:
        hint = "Add it, or set dataset.columns.prompt to the name of the column with the prompts."
    return UserError(f"{place}: no column `prompt`, only {', '.join(names) or 'none'}. {hint}")


def as_text(truth: object) -> str | None:
    """Return a ground truth as text: numbers, lists and objects as JSON."""
    return truth if isinstance(truth, str | None) else _json(truth).decode()


# ------------------------------------------------------------ chat messages


def check_prompt(
    prompt: object,
    place: str,
    column: str = "prompt",
) -> str | list[dict[str, Any]]:
    """Return the value of a column if it is a text or a list of messages.

    A message with `tool_calls` needs no content.

    Raises:
        UserError: it is neither, or empty.
    """
    if isinstance(prompt, str) and prompt:
        return prompt
    messages = cast(list[Any], prompt) if isinstance(prompt, list) else []
    if messages and all(map(is_message, messages)):
        return messages
    for message in messages:
        content: object = (
            cast(DatasetRow, message).get("content") if isinstance(message, dict) else None
        )
        if isinstance(content, list):
            raise UserError(
                f"{place}: a message of `{column}` has a list as its content, as with images. "
                "Images are not supported: write the content as one text."
            )
    raise UserError(
        f"{place}: `{column}` must be a text that is not empty, or a list of messages. "
        'Write "…" or [{"role": "user", "content": "…"}].'
    )


def tool_calls(message: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a message; [] without any."""
    return message.get("tool_calls") or []


def thought_of(message: Any) -> str:
    """Return the thought of an answer; "" without one."""
    for key in THOUGHT_KEYS:
        if message.get(key):
            return str(message[key])
    return ""


def with_thought(message: dict[str, Any], thought: str) -> dict[str, Any]:
    """Return an answer with another thought."""
    return {**message, **dict.fromkeys(THOUGHT_KEYS, thought)}


def for_template(message: Any, template: str) -> dict[str, Any]:
    """Return a message as a chat template expects it.

    Arguments of tool calls are objects, not JSON text (OpenAI). The null values that Parquet adds
    are removed. A thought has the names of all templates. The role is `template_role`.
    """
    prepared = DatasetRow()
    for key, field in message.items():
        if field is not None or key == "content":
            prepared[key] = field
    if calls := tool_calls(message):
        prepared["tool_calls"] = [without_nulls(call) for call in calls]
    prepared["role"] = template_role(message["role"], template)
    thought = thought_of(message)
    return with_thought(prepared, thought) if thought else prepared


def template_role(role: str, template: str = "") -> str:
    """Return the role of a message for a chat template.

    A developer's message is the system's, unless the template names the role: most templates leave
    out the messages of an unknown role.
    """
    is_named = "'developer'" in template or '"developer"' in template
    if role == "developer" and not is_named:
        return "system"
    return role


def without_nulls(node: Any, key: str = "") -> Any:
    """Return a JSON value without null fields, and with decoded `arguments`.

    Args:
        node: The value.
        key: The field that has the value; "" for none.
    """
    if key == "arguments" and isinstance(node, str):
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(node)
    if isinstance(node, dict):
        return {
            name: without_nulls(field, name)
            for name, field in cast(DatasetRow, node).items()
            if field is not None
        }
    if isinstance(node, list):
        return [without_nulls(element) for element in cast(list[Any], node)]
    return node
