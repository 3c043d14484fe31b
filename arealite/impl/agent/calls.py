"""Parse the tool calls in a model's answer, with one function for each format.

A malformed call becomes a Call with an error, which the environment sends to the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """One parsed tool call."""

    name: str = ""
    arguments: dict[str, object] = {}  # noqa: RUF012  (never written to)
    error: str = ""
    """Why the call is malformed; "" for a valid call."""


def hermes(text: str) -> tuple[str, list[Call]]:
    """Parse every `<tool_call>{"name": …, "arguments": {…}}</tool_call>` of an answer.

    Returns:
        The text around the calls, and the calls in order.
    """
    rest, calls, at = "", list[Call](), 0
    while (begin := text.find(OPEN, at)) >= 0:
        rest += text[at:begin]
        call, end = read(text, begin + len(OPEN), "arguments")
        is_closed = text[end:].lstrip().startswith(CLOSE)
        if not is_closed and not call.error:
            call = Call(call.name, error=f"the call does not end with {CLOSE}")
        calls.append(call)
        close = text.find(CLOSE, end)
        at = len(text) if close < 0 else close + len(CLOSE)
    return rest + text[at:], calls


def llama_json(text: str) -> tuple[str, list[Call]]:
    """Parse an answer that consists of `{"name": …, "parameters": {…}}`, or several joined by ";".

    Returns:
        "" and the calls; for any other answer its text and no calls.
    """
    body, calls, at = text.strip().removeprefix("<|python_tag|>").lstrip(), list[Call](), 0
    if not body.startswith("{") or '"name"' not in body:
        return text, []
    while at < len(body):
        call, at = read(body, at, "parameters")
        calls.append(call)
        if call.error.startswith("not JSON"):
            break
        at = len(body) - len(body[at:].lstrip("; \n"))
    return "", calls


Parser = Callable[[str], tuple[str, list[Call]]]
FORMATS: dict[str, Parser] = {"hermes": hermes, "llama_json": llama_json}

FOREIGN = re.compile(
    r"^[ \t]*(?:(?P<mistral>\[TOOL_CALLS\]\s*[\[\w])|(?P<hermes><tool_call>\s*\{)"
    r"|(?P<llama_json><\|python_tag\|>\s*\{)|(?P<python_tag><\|python_tag\|>)"
    r"|(?P<function_tags><function[= ]\w)"
    r"|(?P<harmony>(?:<\|start\|>assistant)?<\|channel\|>[^\n]*to=functions\.)"
    r"|(?P<deepseek><｜tool▁calls?▁begin｜>))|\A\s*+(?:(?:```(?:json|tool_call)?\s*+)?(?:\[\s*+)?\{"
    r'\s*(?:"type"\s*:\s*"function"\s*,\s*"function"\s*:\s*\{\s*)?"name"\s*:\s*"(?P<json>[^"]+)"'
    r"|(?:```(?:python)?)?\s*+\[?(?P<pythonic>[\w.]+)\([^\n]*\)\s*\]?\s*(?:```\s*)?\Z)",
    re.MULTILINE,
)
"""The start of a call in the formats of several models: a marker at the start of a line or, in
formats without a marker, a tool's name at the start of the answer."""


def foreign(text: str, known: Container[str]) -> str:
    """Detect a tool call in another format than the configured one.

    Args:
        text: An answer without calls in the configured format.
        known: Names of the tools.

    Returns:
        The format of the first call; "" if the text holds no call.
    """
    for found in FOREIGN.finditer(text):
        name = found.lastgroup or ""
        if name not in ("json", "pythonic") or found[name] in known:
            return name
    return ""


def read(text: str, at: int, key: str) -> tuple[Call, int]:
    """Parse the JSON object of one call.

    Args:
        text: The answer.
        at: Index in `text` where the object starts; white space before it is skipped.
        key: Key of the arguments in the object.

    Returns:
        The call, and the index after the object. If the object is not JSON, the index of its start.
    """
    at = len(text) - len(text[at:].lstrip())
    try:
        value, end = _decoder.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()  # fails for lone surrogates
    except (ValueError, RecursionError) as error:
        return Call(error=f"not JSON: {error}"), at
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return Call(error='a call must be an object with a "name"'), end
    if not isinstance(arguments := value.get(key), dict):
        return Call(name, error=f'"{key}" must be an object'), end
    return Call(name, arguments), end


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is not a finite number")
    return value


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
