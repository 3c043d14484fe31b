"""Finds AReaLite's columns in the rows of other libraries, and applies `dataset.columns`.

Also checks chat messages, and prepares them for chat templates.
"""

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
CHAT = ("tokens", "messages", "prompt", "completion", "chosen", "rejected")
"""Columns of a row of sft, dpo and reward."""
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's thought, in order of preference."""
PROMPTS = ("question", "problem", "instruction", "query", "input", "messages", "text")
"""Common names of the column with the prompt, for errors."""
ROLES = {"human": "user", "observation": "tool", "function_response": "tool"} | {
    name: "assistant" for name in ("gpt", "chatgpt", "bing")
}
"""Role of a chat message by ShareGPT's `from`; other values are roles already."""
HUMANEVAL = ("prompt", "entry_point", "canonical_solution", "test")
"""Columns of HumanEval's rows. `task_id` is not required."""
BESIDE_QUESTION = {"choices", "options", "context", "passage"}
"""Columns that belong into the prompt: a row with a question and one of them is not recognised."""
Row = dict[str, Any]
Columns = Mapping[str, str]
"""dataset.columns."""
_json = msgspec.json.Encoder().encode


def task_form(row: Row) -> tuple[str, Row]:
    """Return (name of the recognised form or "", the row with AReaLite's columns)."""
    model = row.get("reward_model")
    own = row.get("ground_truth")
    if row.get("extra_info") is None and all(row.get(name) is not None for name in HUMANEVAL):
        info = {"data_source": "humaneval", "entry_point": row["entry_point"], "test": row["test"]}
        truth = as_text(row["canonical_solution"])
        return "HumanEval rows", {**row, "ground_truth": truth, "extra_info": info}
    if "prompt" in row:
        if own is not None or not isinstance(model, dict):
            return "", row
        truth = cast(Row, model).get("ground_truth")
        extra = row.get("extra_info") or Row()
        if isinstance(extra, dict) and "data_source" in row:
            extra = {"data_source": row["data_source"], **cast(Row, extra)}
        form = "verl rows: reward_model.ground_truth"
        return form, {**row, "ground_truth": as_text(truth), "extra_info": extra}
    if {"question", "answer"} <= row.keys() and not BESIDE_QUESTION & row.keys():
        form = "rows: question/answer"
        prompt = row["question"]
        truth = row["answer"]
        if isinstance(truth, str) and "####" in truth:
            form = "GSM8K rows: question/answer, `####` answers"
            truth = truth.rpartition("####")[2].strip().replace(",", "")
    elif "problem" in row and {"answer", "solution"} & row.keys():
        form = "rows: problem/answer"
        prompt = row["problem"]
        truth = row.get("answer")
        if truth is None:
            form = "MATH rows: problem/solution, \\boxed answers"
            truth = row.get("solution")
            truth = boxed(truth) or truth if isinstance(truth, str) else truth
    else:
        return "", row
    return form, {**row, "prompt": prompt, "ground_truth": as_text(truth if own is None else own)}


def chat_row(row: Row) -> Row:
    """Return a row of sft, dpo or reward with AReaLite's columns; ShareGPT's are converted."""
    if row.get("conversations") is None or any(map(row.get, CHAT[:3])):
        return row
    pair = {n: row[n] for n in ("chosen", "rejected") if isinstance(row.get(n), dict | list)}
    system = [{"from": "system", "value": row["system"]}] if row.get("system") else []
    name = "prompt" if pair or "chosen" in row else "messages"
    own = {name: [*system, row["conversations"]], **pair}
    return {**row, **{key: _from_sharegpt(value) for key, value in own.items()}}


def chat_form(row: Row) -> str:
    """Return the name of the form of a row that `chat_row` has returned."""
    kind = "ShareGPT rows" if "conversations" in row else "rows"
    return f"{kind}: {'/'.join(name for name in CHAT if row.get(name) is not None)}"


def _from_sharegpt(value: Any) -> list[Any]:
    """Convert one ShareGPT message or a list of them to chat messages; keep anything else."""
    if isinstance(value, list):
        return [message for each in cast(list[Any], value) for message in _from_sharegpt(each)]
    if not isinstance(value, dict) or "from" not in value:
        return [value]
    message = cast(Row, value)
    role = str(message["from"])
    text = message.get("value")
    others = {key: part for key, part in message.items() if key not in ("from", "value")}
    if role == "function_call" and (calls := _sharegpt_calls(text)):
        return [{"role": "assistant", "content": None, "tool_calls": calls, **others}]
    return [{"role": ROLES.get(role, role), "content": text, **others}]


def _sharegpt_calls(text: object) -> list[Row]:
    """Return the tool calls in the JSON text of a ShareGPT message; [] if it has none."""
    decoded: Any = None
    if isinstance(text, str):
        with suppress(msgspec.DecodeError):
            decoded = msgspec.json.decode(text)
    functions = cast(list[Any], decoded if isinstance(decoded, list) else [decoded])
    if not all(map(_is_schema, functions)):
        return []
    return [{"type": "function", "function": function} for function in functions]


def renamed(row: Row, own: Row, columns: Columns, where: str, known: Sequence[str] = TASK) -> Row:
    """Return `own` with the columns that `dataset.columns` names; its names win over recognition.

    For a task, a name that is not in `known` is added to `extra_info`.

    Args:
        row: The row of the file.
        own: The row with the recognised columns.
        columns: `dataset.columns`: names of the file's columns by our names. `a.b` is the value b
            in column a.
        where: The place of the row, for errors.
        known: AReaLite's columns.

    Raises:
        UserError: the row does not have a column, or `columns` has a misspelled name.
    """
    own = {**own}
    extra = dict[str, object]()
    for name, path in columns.items():
        value = _find(row, path, name, where)
        if name in known:
            own[name] = as_text(value) if name == "ground_truth" else value
        elif known is not TASK or difflib.get_close_matches(name, TASK, n=1, cutoff=0.75):
            raise UserError(unknown("key of dataset.columns", name, known))
        else:
            extra[name] = value
    if extra and isinstance(own.get("extra_info") or {}, dict):
        own["extra_info"] = {**(own.get("extra_info") or {}), **extra}
    return own


def _find(row: Row, path: str, name: str, where: str) -> object:
    value: Any = row
    for key in [path] if path in row else path.split("."):
        if not isinstance(value, dict) or key not in value:
            near = difflib.get_close_matches(path, [*row], n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            what = f"no column `{path}` (dataset.columns.{name}), only {', '.join(row) or 'none'}"
            raise UserError(f"{where}: {what}.{hint}")
        value = cast(Row, value)[key]
    return cast(object, value)


def no_prompt(names: Sequence[str], where: str) -> UserError:
    """Return the error for a row without a prompt; it names the file's columns and the fix."""
    near = [*difflib.get_close_matches("prompt", names, n=1), *(n for n in PROMPTS if n in names)]
    hint = "Add it, or set dataset.columns.prompt to the name of the column with the prompts."
    if near:
        fix = f"Rename it to `prompt`, or set dataset.columns.prompt={near[0]}."
        hint = f"Did you mean '{near[0]}'? {fix}"
    return UserError(f"{where}: no column `prompt`, only {', '.join(names) or 'none'}. {hint}")


def as_text(value: object) -> str | None:
    """Return a ground truth as text: numbers, lists and objects as JSON."""
    return value if isinstance(value, str | None) else _json(value).decode()


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{…} of a text; None without one."""
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, letter in enumerate(rest if mark else ""):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return rest[:end]
    return None


# ------------------------------------------------------------ chat messages


def check_prompt(prompt: object, where: str, column: str = "prompt") -> str | list[dict[str, Any]]:
    """Return the value of a column if it is a text or a list of messages.

    A message with `tool_calls` needs no content.

    Raises:
        UserError: it is neither, or empty.
    """
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(is_message, cast(list[object], prompt))):
        return cast(list[dict[str, Any]], prompt)
    for each in cast(list[Any], prompt) if isinstance(prompt, list) else ():
        if isinstance(each, dict) and isinstance(cast(Any, each).get("content"), list):
            what = f"{where}: a message of `{column}` has a list as its content, as with images"
            raise UserError(f"{what}. Images are not supported: write the content as one text.")
    what = f"{where}: `{column}` must be a text that is not empty, or a list of messages"
    fix = 'Write "…" or [{"role": "user", "content": "…"}].'
    raise UserError(f"{what}. {fix}")


def tool_calls(message: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a message; [] without any."""
    return message.get("tool_calls") or []


def thought_of(message: Any) -> str:
    """Return the thought of an answer; "" without one."""
    return next((str(message[key]) for key in THOUGHT_KEYS if message.get(key)), "")


def with_thought(message: dict[str, Any], thought: str) -> dict[str, Any]:
    """Return an answer with another thought."""
    return {**message, **dict.fromkeys(THOUGHT_KEYS, thought)}


def for_template(message: Any, template: str) -> dict[str, Any]:
    """Return a message as a chat template expects it.

    Arguments of tool calls are objects, not JSON text (OpenAI). The null values that Parquet adds
    are removed. A thought has the names of all templates. The role is `template_role`.
    """
    kept = {key: each for key, each in message.items() if each is not None or key == "content"}
    calls = [_without_nulls(each) for each in tool_calls(message)]
    kept |= {"tool_calls": calls} if calls else {}
    kept["role"] = template_role(message["role"], template)
    thought = thought_of(message)
    return with_thought(kept, thought) if thought else kept


def read_tools(value: object, where: str) -> list[dict[str, Any]]:
    """Return the schemas in a row's column `tools`: a list, or JSON text of a list; [] for null.

    Raises:
        UserError: the column is neither, or a schema has no name.
    """
    decoded = value
    if isinstance(value, str):
        with suppress(msgspec.DecodeError):
            decoded = cast(object, msgspec.json.decode(value)) if value.strip() else None
    schemas = cast(list[object], [] if decoded is None else decoded)
    if not isinstance(decoded, list | None) or not all(map(_is_schema, schemas)):
        raise UserError(
            f"{where}: `tools` must be a list of function schemas, or JSON text of such a list. "
            'Write [{"type": "function", "function": {"name": …, "parameters": …}}, …].'
        )
    return [_without_nulls(schema) for schema in schemas]


def _is_schema(value: object) -> bool:
    schema = cast(Row, value) if isinstance(value, dict) else Row()
    function = schema.get("function") or schema
    return isinstance(function, dict) and isinstance(cast(Row, function).get("name"), str)


def template_role(role: str, template: str = "") -> str:
    """Return the role of a message for a chat template.

    A developer's message is the system's, unless the template names the role: most templates leave
    out the messages of an unknown role.
    """
    is_named = "'developer'" in template or '"developer"' in template
    return "system" if role == "developer" and not is_named else role


def _without_nulls(value: Any, key: str = "") -> Any:
    if key == "arguments" and isinstance(value, str):
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(value)
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {name: _without_nulls(each, name) for name, each in items if each is not None}
    is_list = isinstance(value, list)
    return [_without_nulls(each) for each in cast(list[Any], value)] if is_list else value
