"""Model families: how their answers contain thoughts and tool calls."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import msgspec

from arealite.base.errors import UserError
from arealite.base.registry import unknown

Tools = Sequence[dict[str, Any]]
"""OpenAI function schemas: {"type": "function", "function": {"name", "parameters", …}}."""


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
    """The calls that begin at a marker or, without calls, the header of a thought or a text."""

    end: int
    """Index after the part."""
    calls: Sequence[RawCall] = ()
    mode: str = "start"
    """What follows: "start" (anything), "thought" or "text"."""


class CallError(Exception):
    """A call that cannot be read.

    Args:
        why: The reason.
        at: Index after which the call's close marker is searched; None: more text may help.
    """

    def __init__(self, why: str, at: int | None = None) -> None:
        super().__init__(why)
        self.at = at


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the models of a family write thoughts and tool calls."""

    name: str
    think: tuple[str, str] = ("", "")
    """Markers around a thought at the start of an answer."""
    openers: tuple[str, ...] = ()
    """Markers that begin a call."""
    first: tuple[str, ...] = ()
    """Texts that begin a call only at the start of an answer or after a call."""
    noise: tuple[str, ...] = ()
    """Markers without a meaning of their own."""
    has_channels: bool = False
    """Whether every message has a header, also without tools."""
    read: Callable[[Family, str, int, Tools], Part] | None = None
    """Reads the part at a marker; None: `read_json`."""
    head: str = ""
    """Pattern of a call up to its JSON or tags. It may have the groups `name` and `id`."""
    close: str = ""
    """Marker that ends a call; "" without one."""
    key: str = "arguments"
    """Key of the arguments in the JSON of a call."""
    tags: tuple[str, str, str] = ("", "", "")
    """Patterns of calls with tags: end of the call, and an argument with `key` and `value`; before
    them, the text that begins an argument."""
    named: str = ""
    """Text that begins a call of the tool {name}."""
    sampled_id: str = ""
    """Pattern of the model's own ids that clients get; "": none."""

    def opening(self, tool: str | None) -> str:
        """Return the text that begins a call of a tool, or of any; "" if it cannot be forced."""
        return self.named.partition("{name}")[0] if not tool else self.named.replace("{name}", tool)

    def call_id(self, *parts: bytes) -> str:
        """Return an id of a call; equal parts give equal ids."""
        made = hashlib.blake2b(digest_size=12)
        for part in parts:
            made.update(part)
        name = made.hexdigest()
        return name[:9] if self.name == "mistral" else f"call_{name}"  # Mistral's needs nine

    def parse(self, text: str, at: int, tools: Tools) -> Part:
        """Read the part at the marker at an index.

        Raises:
            CallError: A call is malformed or not complete.
        """
        try:
            part = (self.read or read_json)(self, text, at, tools)
            for call in part.calls:
                _decode_object(call.arguments)
        except INVALID as error:
            why = f"not JSON: {error}"
            if re.search(r"\$\[\d", str(error)):  # the place of the error is a call
                why = f'a call must be an object with a "name": {error}'
            elif str(error).startswith("Expected `object`"):
                why = f'"{self.key}" must be an object'
            raise CallError(why, at) from error
        return part


# ------------------------------------------------------------ readers


def skip(text: str, at: int, characters: str) -> int:
    """Return the index after characters, the inside of a regular expression's [...]."""
    found = re.compile(f"[^{characters}]").search(text, at)
    return found.start() if found else len(text)


def read_json(family: Family, text: str, at: int, tools: Tools) -> Part:
    """Read calls that are JSON, or whose arguments are."""
    if (head := re.compile(family.head).match(text, at)) is None:
        raise CallError(f"a call must have the form {family.named}…{family.close}")
    begin, close = head.end(), family.close
    try:
        end = after = _decoder.raw_decode(text, begin)[1]
    except (ValueError, RecursionError) as error:
        wrong = getattr(error, "pos", begin)
        is_open = str(error).startswith("Unterminated") or wrong > len(text) - 10
        raise CallError(f"not JSON: {error}", None if is_open else wrong) from error
    if close and not text.startswith(close, after := skip(text, end, r"\s`")):
        is_open = close.startswith(text[after : after + len(close)])
        raise CallError(f"the call does not end with {close}", None if is_open else end)
    body, raw, calls = text[begin:end], text[at : after + len(close)], list[RawCall]()
    if name := (named := head.groupdict()).get("name"):
        calls.append(RawCall(name, body, "", raw, named.get("id") or ""))
    else:
        for each in _decode_calls(body if body[0] == "[" else f"[{body}]"):
            arguments = bytes(getattr(each, family.key)).decode()
            calls.append(RawCall(each.name, arguments, "", raw, str(each.id)))
            raw = f", {each.name}{arguments}"
    return Part(after + len(close), calls)


def read_tags(family: Family, text: str, at: int, tools: Tools) -> Part:
    """Read a call whose arguments are tags with unquoted values."""
    tag, tail, argument = family.tags
    if (end := re.compile(tail).search(text, at)) is None:
        raise CallError(f"the call does not end with {family.close}")
    head = re.compile(family.head).match(text, at, end.start())
    before, *tags = text[head.end() if head else at : end.start()].split(tag)
    pairs = [re.fullmatch(argument, each, re.DOTALL) for each in tags]
    if not head or before.strip() or not all(pairs):
        raise CallError(f"a call must have the form {family.named}…{family.close}", at)
    functions = (tool.get("function") for tool in tools)
    schema = next((each for each in functions if _get(each, "name") == head["name"]), None)
    values = {
        pair["key"]: to_json(pair["value"], _get(schema, "parameters", "properties", pair["key"]))
        for pair in filter(None, pairs)
    }
    arguments = "{" + ", ".join(f"{_json(key)}: {value}" for key, value in values.items()) + "}"
    return Part(end.end(), [RawCall(head["name"], arguments, "", text[at : end.end()])])


def to_json(value: str, schema: object) -> str:
    """Convert an unquoted value to JSON: a string if its schema says so, or if it is not JSON."""
    kinds = {*KINDS.findall(msgspec.json.encode(schema))}
    if kinds == {b"boolean"}:
        value = value.lower()
    if not kinds or not kinds <= {b"string", b"null"} or (value == "null" and b"null" in kinds):
        try:
            msgspec.json.decode(value)
            return value
        except INVALID:
            pass
    return _json(value)


def _get(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_channel(family: Family, text: str, at: int, tools: Tools) -> Part:
    """Read the header of a message: the channel of a thought or a text, or a call."""
    head = re.compile(family.head).match(text, at)
    if not head or head["name"]:
        return read_json(family, text, at, tools)
    return Part(head.end(), mode="thought" if head["channel"] == "analysis" else "text")


class _Object(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: msgspec.Raw = msgspec.Raw(b"null")
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    id: object = ""


INVALID = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of JSON that cannot be decoded."""
KINDS = re.compile(rb'"(string|integer|number|boolean|array|object|null)"')
"""Types in a JSON schema."""
_json = json.JSONEncoder(ensure_ascii=False).encode
_decoder = json.JSONDecoder()
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_calls = msgspec.json.Decoder(Annotated[list[_Object], msgspec.Meta(min_length=1)]).decode

# ------------------------------------------------------------ families

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK = ("<think>", "</think>")
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
HERMES = Family(
    name="qwen2_5",
    openers=(OPEN,),
    head=rf"{OPEN}\s*",
    close=CLOSE,
    named=f'{OPEN}\n{{"name": "{{name}}", "arguments": ',
)
LISTED = (
    Family(name="text"),
    HERMES,
    replace(HERMES, name="qwen3", think=THINK),
    Family(
        name="qwen3_coder",
        think=THINK,
        openers=(OPEN,),
        read=read_tags,
        head=rf"{OPEN}\s*<function=(?P<name>[^>\s]+)>",
        close=CLOSE,
        tags=(
            "<parameter=",
            rf"</function>\s*{CLOSE}",
            r"(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>\s*",
        ),
        named=f"{OPEN}\n<function={{name}}>\n",
    ),
    Family(
        name="llama3_1",
        openers=("<|python_tag|>",),
        first=("{",),
        head=r"(?:<\|python_tag\|>)?\s*",
        key="parameters",
        named='{"name": "{name}", "parameters": ',
    ),
    Family(
        name="mistral",
        think=("[THINK]", "[/THINK]"),
        openers=("[TOOL_CALLS]",),
        head=r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(\[CALL_ID\](?P<id>\w*))?(\[ARGS\])?\s*)?",
        named='[TOOL_CALLS] [{"name": "{name}", "arguments": ',
        sampled_id="[A-Za-z0-9]{9}",
    ),
    Family(
        name="glm4_5",
        think=THINK,
        openers=(OPEN,),
        read=read_tags,
        head=rf"{OPEN}\s*(?P<name>[^\s<]+)",
        close=CLOSE,
        tags=(
            "<arg_key>",
            CLOSE,
            r"(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*",
        ),
        named=f"{OPEN}{{name}}\n",
    ),
    Family(
        name="deepseek_v3",
        think=THINK,
        openers=("<｜tool▁call▁begin｜>",),
        noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        head=r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]+)"
        r"(?:<｜tool▁sep｜>|\s*```(?:json)?)\s*",
        close="<｜tool▁call▁end｜>",
        named=f"{DEEPSEEK}function<｜tool▁sep｜>{{name}}\n```json\n",
    ),
    Family(
        name="kimi_k2",
        think=THINK,
        openers=("<|tool_call_begin|>",),
        noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        head=r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*"
        r"<\|tool_call_argument_begin\|>\s*",
        close="<|tool_call_end|>",
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
        head=r"(?:<\|start\|>assistant)?"  # the recipient stands before or after the channel
        r"(?:(?=(?:[^<]*<\|channel\|>)?[^<]*?to=(?:functions\.)?(?P<name>[^\s<]+))|)"
        r"[^<]*<\|channel\|>(?P<channel>\w*+)[^<]*+(?:<\|constrain\|>[^<]*)?<\|message\|>\s*",
        named=" to=functions.{name}<|channel|>commentary json<|message|>",
    ),
    Family(
        name="granite",
        think=THINK,
        openers=("<|tool_call|>",),
        head=r"<\|tool_call\|>\s*",
        named='<|tool_call|>[{"name": "{name}", "arguments": ',
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in LISTED}
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
    found = (family for marker, family in MARKERS.items() if marker in template)
    family = FAMILIES.get(next(found, "text") if name == "auto" else name)
    if family is None:
        raise UserError(f"gateway.parser={name}: {unknown('family', name, ['auto', *FAMILIES])}")
    if name == "auto" and THINK[0] in template and not any(family.think):
        family = FAMILIES["qwen3"] if family is HERMES else replace(family, think=THINK)
    if family.name == "mistral" and "[ARGS]" in template:
        return replace(family, named="[TOOL_CALLS]{name}[ARGS]")
    if family.name == "deepseek_v3" and "```" not in template:
        return replace(family, named=f"{DEEPSEEK}{{name}}<｜tool▁sep｜>")
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
