"""Model families: how their answers contain thoughts and tool calls.

Reading a call never fails: a call that cannot be read has an error.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from arealite.base.errors import UserError
from arealite.base.registry import unknown

Tools = Sequence[dict[str, Any]]
"""OpenAI function schemas: {"type": "function", "function": {"name", "parameters", …}}."""
SPACE = " \t\r\n"


class RawCall(NamedTuple):
    """One tool call of an answer."""

    name: str = ""
    arguments: str = "{}"
    """JSON of an object, as sampled if it is JSON there."""
    error: str = ""
    """Why the call cannot be read; "" for a valid call."""
    raw: str = ""
    """Text of the call, with its markers."""
    id: str = ""
    """Id that the model gave to the call; "" without one."""


class Part(NamedTuple):
    """The calls that begin at a marker, or a header that begins a thought or a text."""

    end: int
    """Index after the part."""
    calls: Sequence[RawCall] = ()
    mode: str = "start"
    """What follows: "start" (anything), "thought" or "text"."""
    is_text: bool = False
    """Whether the part is text after all."""


Reader = Callable[["Family", str, int, bool, Tools], Part | None]
"""(family, text, at, is_end, tools): read the part at index `at`; None if more text is needed."""


# ------------------------------------------------------------ calls


def unreadable(
    family: Family, text: str, span: tuple[int, int], is_end: bool, why: str
) -> Part | None:
    """Return a malformed call.

    Args:
        family: The family.
        text: The answer.
        span: Index of the call, and the index after which its close marker is searched. Without
            one, the call ends with the answer.
        is_end: Whether the answer is complete.
        why: The error.
    """
    at, begin = span
    end = text.find(family.close, begin) if family.close else -1
    if end < 0 and not is_end:
        return None
    end = len(text) if end < 0 else end + len(family.close)
    if text[at] == "{" and '"name"' not in text[at:end]:
        return Part(end, mode="text", is_text=True)  # JSON without a marker, not a call
    return Part(end, [RawCall(error=why, raw=text[at:end])])


def read_json(family: Family, text: str, at: int, is_end: bool, tools: Tools) -> Part | None:
    """Read calls whose arguments, or that themselves, are JSON."""
    if (head := re.compile(family.head).match(text, at)) is None:
        return unreadable(family, text, (at, at), is_end, f"a call must match {family.head}")
    begin = head.end()
    try:
        if text[begin : begin + 1] not in ("{", "[", ""):
            raise json.JSONDecodeError("Expecting an object", text, begin)
        end = _decoder.raw_decode(text, begin)[1]
    except (ValueError, RecursionError) as error:
        wrong = begin
        if isinstance(error, json.JSONDecodeError):
            is_open = error.msg.startswith("Unterminated") or error.pos > len(text) - 10
            if is_open and not is_end:
                return None
            wrong = begin if is_open else error.pos
        return unreadable(family, text, (at, wrong), is_end, f"not JSON: {error}")
    after = _skip(family.skip).match(text, end).end()  # pyright: ignore  (always matches)
    if not text.startswith(family.close, after):
        if not is_end and family.close.startswith(text[after:]):
            return None
        why = f"the call does not end with {family.close}"
        return unreadable(family, text, (at, end), is_end, why)
    if text[at] == "{" and '"name"' not in text[at:end]:
        return Part(end, mode="text", is_text=True)
    after += len(family.close)
    named, body, raw = head.groupdict(), text[begin:end], text[at:after]
    if name := named.get("name"):
        return Part(after, [check(family.key, RawCall(name, body, "", raw, named.get("id") or ""))])
    return Part(after, list(_objects(family.key, body, raw)))


def _objects(key: str, body: str, raw: str) -> Sequence[RawCall]:
    """Return the calls of one JSON object or of a list of objects."""
    try:
        items = msgspec.json.decode(body, type=list[msgspec.Raw]) if body[0] == "[" else []
        if len(items) < 2:
            return [_object(key, bytes(items[0]) if items else body.encode(), raw)]
        return [_object(key, bytes(item), bytes(item).decode()) for item in items]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return [RawCall(error=f"not JSON: {error}", raw=raw)]


def _object(key: str, body: bytes, raw: str) -> RawCall:
    try:
        call = msgspec.json.decode(body, type=_Object)
    except msgspec.ValidationError:
        call = _Object("")
    if not call.name:
        return RawCall(error='a call must be an object with a "name"', raw=raw)
    arguments = bytes(call.arguments if key == "arguments" else call.parameters).decode()
    return check(key, RawCall(call.name, arguments, "", raw, str(call.id)))


class _Object(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"null")
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    id: object = ""


def check(key: str, call: RawCall) -> RawCall:
    """Return a call, with an error if its arguments are not a JSON object."""
    try:
        _decode_object(call.arguments)
    except msgspec.ValidationError:
        return RawCall(call.name, error=f'"{key}" must be an object', raw=call.raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return RawCall(call.name, error=f"not JSON: {error}", raw=call.raw)
    return call


def read_xml(family: Family, text: str, at: int, is_end: bool, tools: Tools) -> Part | None:
    """Read a call whose arguments are tags with unquoted values."""
    if (tail := re.compile(family.tail).search(text, at)) is None:
        why = f"the call does not end with {family.close}"
        return unreadable(family, text, (at, at), True, why) if is_end else None
    head = re.compile(family.head).match(text, at, tail.start())
    before, *tags = text[head.end() if head else at : tail.start()].split(family.tag)
    pairs = [re.fullmatch(family.argument, tag, re.DOTALL) for tag in tags]
    if not head or before.strip() or not all(pairs):
        why = f"a call must have the form {family.named}…{family.close}"
        return unreadable(family, text, (at, at), True, why)
    schemas = next((_properties(tool) for tool in tools if _name(tool) == head["name"]), {})
    values = {pair["key"]: pair["value"] for pair in pairs if pair}
    fields = (f"{_json(key)}: {to_json(values[key], schemas.get(key))}" for key in values)
    raw, arguments = text[at : tail.end()], "{" + ", ".join(fields) + "}"
    return Part(tail.end(), [check(family.key, RawCall(head["name"], arguments, "", raw))])


def _name(tool: dict[str, Any]) -> object:
    return tool.get("function", tool).get("name")


def _properties(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool.get("function", tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def to_json(value: str, schema: object) -> str:
    """Convert an unquoted value to JSON: a string if its schema says so, or if it is not JSON."""
    kinds, options = set[object](), schema if isinstance(schema, dict) else {}
    for each in (options, *options.get("anyOf", ()), *options.get("oneOf", ())):
        kind = each.get("type") if isinstance(each, dict) else None
        kinds.update(kind if isinstance(kind, list) else [kind] if kind else [])
    is_text = (
        bool(kinds) and kinds <= {"string", "null"} and not (value == "null" and len(kinds) > 1)
    )
    if kinds == {"boolean"}:
        value = value.lower()
    try:
        if not is_text:
            msgspec.json.decode(value)
            return value.strip()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    return _json(value)


def read_channel(family: Family, text: str, at: int, is_end: bool, tools: Tools) -> Part | None:
    """Read the header of a message: the channel of a thought or a text, or a call."""
    if (head := re.compile(HEADER).match(text, at)) is None:
        if not is_end and text.find("<|message|>", at) < 0:
            return None
        end = text.find("<", at + 1)
        return Part(len(text) if end < 0 else end, mode="text", is_text=True)
    if head["name"]:
        return read_json(family, text, at, is_end, tools)
    return Part(head.end(), mode="thought" if head["channel"] == "analysis" else "text")


_json = json.JSONEncoder(ensure_ascii=False).encode
_decoder = json.JSONDecoder()
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def _skip(characters: str) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(characters)}]*")


# ------------------------------------------------------------ families


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the models of a family write thoughts and tool calls."""

    name: str
    think: tuple[str, str] | None = None
    """Markers around a thought at the start of an answer."""
    openers: tuple[str, ...] = ()
    """Markers that begin a call."""
    first: tuple[str, ...] = ()
    """Texts that begin a call only at the start of an answer or after a call."""
    noise: tuple[str, ...] = ()
    """Markers without a meaning of their own."""
    has_channels: bool = False
    """Whether every message has a header, also without tools."""
    read: Reader = read_json
    head: str = ""
    """Pattern of a call up to its JSON or tags, with the groups `name` and `id` if it has them."""
    close: str = ""
    """Marker that ends a call; "" without one."""
    tail: str = ""
    """Pattern of the end of a call with tags."""
    tag: str = ""
    """Text that begins an argument."""
    argument: str = ""
    """Pattern of an argument after `tag`, with the groups `key` and `value`."""
    skip: str = SPACE
    """Characters that may follow the JSON of a call."""
    key: str = "arguments"
    """Key of the arguments in the JSON of a call."""
    begin: str = ""
    """Text that begins a call of any tool."""
    named: str = ""
    """Text that begins a call of the tool {name}."""
    sampled_id: str = ""
    """Pattern of the model's own ids that clients get; "": no id."""
    has_short_ids: bool = False
    """Whether the template needs ids of nine letters and digits."""

    def opening(self, tool: str | None) -> str:
        """Return the text that begins a call of a tool, or of any; "" if it cannot be forced."""
        return self.begin if tool is None else self.named.replace("{name}", tool)

    def call_id(self, seed: str, number: int) -> str:
        """Return an id; equal arguments give equal ids."""
        name = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=12).hexdigest()
        return name[:9] if self.has_short_ids else f"call_{name}"


OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK = ("<think>", "</think>")
HEADER = (
    r"(?:<\|start\|>assistant)?"
    r"(?:(?=(?:[^<]*<\|channel\|>)?[^<]*?to=(?:functions\.)?(?P<name>[^\s<]+))|)"
    r"[^<]*<\|channel\|>(?P<channel>\w*)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>\s*"
)
"""The recipient stands before or after the channel."""
TEXT = Family(name="text")
HERMES = Family(
    name="qwen2_5",
    openers=(OPEN,),
    head=rf"{OPEN}\s*",
    close=CLOSE,
    begin=f'{OPEN}\n{{"name": "',
    named=f'{OPEN}\n{{"name": "{{name}}", "arguments": ',
)
MISTRAL = Family(
    name="mistral",
    think=("[THINK]", "[/THINK]"),
    openers=("[TOOL_CALLS]",),
    head=r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w*))?(?:\[ARGS\])?\s*)?",
    begin='[TOOL_CALLS] [{"name": "',
    named='[TOOL_CALLS] [{"name": "{name}", "arguments": ',
    sampled_id="[A-Za-z0-9]{9}",
    has_short_ids=True,
)
DEEPSEEK = Family(
    name="deepseek_v3",
    think=THINK,
    openers=("<｜tool▁call▁begin｜>",),
    noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    head=r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]+)"
    r"(?:<｜tool▁sep｜>|\s*```(?:json)?)\s*",
    close="<｜tool▁call▁end｜>",
    skip=f"{SPACE}`",
    begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    named="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
)
VARIANTS = {
    "mistral": replace(MISTRAL, begin="[TOOL_CALLS]", named="[TOOL_CALLS]{name}[ARGS]"),
    "deepseek_v3": replace(
        DEEPSEEK,
        begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        named="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    ),
}
"""Newer forms of a family: Mistral's [ARGS], and DeepSeek-V3.1 without code fences."""
LISTED = (
    TEXT,
    HERMES,
    replace(HERMES, name="qwen3", think=THINK),
    Family(
        name="qwen3_coder",
        think=THINK,
        openers=(OPEN,),
        read=read_xml,
        head=rf"{OPEN}\s*<function=(?P<name>[^>\s]+)>",
        close=CLOSE,
        tail=rf"\n?</function>\s*{CLOSE}",
        tag="<parameter=",
        argument=r"(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>\s*",
        begin=f"{OPEN}\n<function=",
        named=f"{OPEN}\n<function={{name}}>\n",
    ),
    Family(
        name="llama3_1",
        openers=("<|python_tag|>",),
        first=("{",),
        head=r"(?:<\|python_tag\|>)?\s*",
        skip=f"{SPACE};",
        key="parameters",
        begin='{"name": "',
        named='{"name": "{name}", "parameters": ',
    ),
    MISTRAL,
    Family(
        name="glm4_5",
        think=THINK,
        openers=(OPEN,),
        read=read_xml,
        head=rf"{OPEN}\s*(?P<name>[^\s<]+)",
        close=CLOSE,
        tail=CLOSE,
        tag="<arg_key>",
        argument=r"(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*",
        begin=OPEN,
        named=f"{OPEN}{{name}}\n",
    ),
    DEEPSEEK,
    Family(
        name="kimi_k2",
        think=THINK,
        openers=("<|tool_call_begin|>",),
        noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        head=r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*"
        r"<\|tool_call_argument_begin\|>\s*",
        close="<|tool_call_end|>",
        begin="<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        named="<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:",
        sampled_id=r"functions\.[^\s<]+:\d+",
    ),
    Family(
        name="gpt_oss",
        think=("", "<|end|>"),
        openers=("<|start|>", "<|channel|>"),
        first=("to=",),
        noise=("<|end|>", "<|return|>", "<|call|>"),
        has_channels=True,
        read=read_channel,
        head=HEADER,
        begin=" to=functions.",
        named=" to=functions.{name}<|channel|>commentary json<|message|>",
    ),
    Family(
        name="granite",
        think=THINK,
        openers=("<|tool_call|>",),
        head=r"<\|tool_call\|>\s*",
        begin='<|tool_call|>[{"name": "',
        named='<|tool_call|>[{"name": "{name}", "arguments": ',
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in LISTED}
FORMATS = {"hermes": HERMES, "llama_json": FAMILIES["llama3_1"], **FAMILIES}
del FORMATS["text"]
"""Families by the values of the option `format` of the agent tool_use."""
MARKERS = {
    "<|channel|>": "gpt_oss",
    "<arg_key>": "glm4_5",
    "<function=": "qwen3_coder",
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "[TOOL_CALLS]": "mistral",
    "<|tool_call|>": "granite",
    OPEN: "qwen2_5",
    "ipython": "llama3_1",
}
"""Markers of chat templates, and their families. The first marker in a template counts."""


def family_of(tokenizer: Any, name: str = "auto") -> Family:
    """Return a family by its name; "auto": by the markers in the tokenizer's chat template.

    Raises:
        UserError: The name is unknown.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if name == "auto":
        found = (family for marker, family in MARKERS.items() if marker in template)
        family = FAMILIES[next(found, "text")]
    elif name in FAMILIES:
        family = FAMILIES[name]
    else:
        raise UserError(f"gateway.parser={name}: {unknown('family', name, ['auto', *FAMILIES])}")
    if "[ARGS]" in template or ("tool▁sep" in template and "```" not in template):
        family = VARIANTS.get(family.name, family)
    if name == "auto" and THINK[0] in template and family.think is None:
        family = FAMILIES["qwen3"] if family is HERMES else replace(family, think=THINK)
    return family


FOREIGN = re.compile(
    r"^[ \t]*(?:(?P<mistral>\[TOOL_CALLS\]\s*[\[\w])|(?P<hermes><tool_call>\s*\{)"
    r"|(?P<llama_json><\|python_tag\|>\s*\{)|(?P<python_tag><\|python_tag\|>)"
    r"|(?P<qwen3_coder><tool_call>\s*<function=\w)|(?P<function_tags><function[= ]\w)"
    r"|(?P<glm4_5><tool_call>[\w.-]+\s*<arg_key>)|(?P<granite><\|tool_call\|>\s*\[)"
    r"|(?P<kimi_k2><\|tool_calls_section_begin\|><)"
    r"|(?P<gpt_oss>(?:<\|start\|>assistant)?<\|channel\|>[^\n]*to=functions\.)"
    r"|(?P<deepseek_v3><｜tool▁calls?▁begin｜>))|\A\s*+(?:(?:```(?:json|tool_call)?\s*+)?(?:\[\s*+)?\{"
    r'\s*(?:"type"\s*:\s*"function"\s*,\s*"function"\s*:\s*\{\s*)?"name"\s*:\s*"(?P<json>[^"]+)"'
    r"|(?:```(?:python)?)?\s*+\[?(?P<pythonic>[\w.]+)\([^\n]*\)\s*\]?\s*(?:```\s*)?\Z)",
    re.MULTILINE,
)
"""The start of a call in the formats of several models: a marker at the start of a line or, in
formats without a marker, a tool's name at the start of the answer."""


def foreign(text: str, known: Sequence[str]) -> str:
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
