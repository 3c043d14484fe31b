"""Model families: how their answers contain thoughts and tool calls. Their data: families.toml."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from arealite.base.errors import UserError
from arealite.base.files import read_toml
from arealite.base.registry import unknown
from arealite.ext.gateway.request_data import ParsedCall

ToolSchemas = Sequence[dict[str, Any]]
"""OpenAI function schemas: {"type": "function", "function": {"name", "parameters", …}}."""


class MarkedPart(NamedTuple):
    """The calls that begin at a marker or, without calls, the header of a thought or a text."""

    end: int
    """Index after the part."""
    calls: Sequence[ParsedCall] = ()
    """Their ids are the model's own; "" without one."""
    mode: str = "start"
    """What follows: "start" (anything), "thought" or "text"."""


class CallError(Exception):
    """A call that cannot be read.

    Args:
        reason: Why the call cannot be read.
        at: Index after which the call's close marker is searched; None: a close marker in the text
            so far may belong to an argument.
    """

    def __init__(self, reason: str, at: int | None = None) -> None:
        super().__init__(reason)
        self.at = at


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """How the models of a family write thoughts and tool calls."""

    name: str
    markers: Sequence[str] = ()
    """Texts that all chat templates of the family contain."""
    think: Sequence[str] = ("", "")
    """Markers around a thought at the start of an answer."""
    openers: Sequence[str] = ()
    """Markers that begin a call."""
    first: Sequence[str] = ()
    """Texts that begin a call only at the start of an answer or after a call."""
    noise: Sequence[str] = ()
    """Markers without a meaning of their own."""
    has_channels: bool = False
    """Every message has a header, also without tools."""
    head: str = ""
    """Pattern of a call up to its JSON or tags. It may have the groups `name` and `id`."""
    close: str = ""
    """Marker that ends a call; "" without one."""
    key: str = "arguments"
    """Key of the arguments in the JSON of a call."""
    tail: str = ""
    """Pattern of the end of a call with tags."""
    tag: str = ""
    """Text that begins an argument."""
    argument: str = ""
    """Pattern of an argument after `tag`, with the groups `key` and `value`."""
    named: str = ""
    """Text that begins a call of the tool {name}."""
    sampled_id: str = ""
    """Pattern of the model's own ids that clients get; "": none."""

    def opening(self, tool_name: str | None) -> str:
        """Return the text that begins a call of a tool, or of any; "" if it cannot be forced."""
        if not tool_name:
            return self.named.partition("{name}")[0]
        return self.named.replace("{name}", tool_name)

    def parse(self, answer: str, at: int, tools: ToolSchemas) -> MarkedPart:
        """Read the part at the marker at an index.

        Raises:
            CallError: A call is malformed or not complete.
        """
        read = read_tags if self.tag else read_json
        part = read(self, answer, at, tools)
        for call in part.calls:
            _decoded(
                _decode_arguments,
                call.arguments,
                rule=f'"{self.key}" must be an object',
                at=at,
            )
        return part


# ------------------------------------------------------------ readers


def skip(answer: str, at: int, characters: str) -> int:
    """Return the index after characters, the inside of a regular expression's [...]."""
    other = re.compile(f"[^{characters}]").search(answer, at)
    return other.start() if other else len(answer)


def _decoded(decode: Callable[[str], Any], json_text: str, *, rule: str, at: int) -> Any:
    """Decode JSON of a call.

    Raises:
        CallError: It is not JSON, or breaks the rule.
    """
    try:
        return decode(json_text)
    except INVALID as error:
        reason = rule if isinstance(error, msgspec.ValidationError) else "not JSON"
        raise CallError(f"{reason}: {error}", at) from error


def read_json(family: Family, answer: str, at: int, tools: ToolSchemas) -> MarkedPart:
    """Read calls that are JSON, or whose arguments are; or the header of a message."""
    head = re.compile(family.head).match(answer, at)
    if head is None:
        raise CallError(f"a call must have the form {family.named}…{family.close}")
    begin = head.end()
    if family.has_channels and not head["name"]:
        is_thought = head["channel"] == "analysis"
        return MarkedPart(begin, mode="thought" if is_thought else "text")
    json_end = _end_of_json(answer, begin)
    end = _end_after_close(family, answer, json_end)
    body = answer[begin:json_end]
    raw = answer[at:end]
    groups = head.groupdict()
    name = groups.get("name")
    if not name:
        return MarkedPart(end, _calls_in_json(family, body, raw, at))
    call = ParsedCall(
        id=groups.get("id") or "",
        name=name,
        arguments=body,
        raw=raw,
    )
    return MarkedPart(end, [call])


def _end_of_json(answer: str, begin: int) -> int:
    """Return the index after the JSON at an index.

    Raises:
        CallError: There is no JSON, or it is not complete.
    """
    try:
        _, end = _decoder.raw_decode(answer, begin)
    except (ValueError, RecursionError) as error:
        # In a string that is still open, a close marker may be a part of the string.
        is_open_string = str(error).startswith("Unterminated")
        wrong_at = None if is_open_string else getattr(error, "pos", begin)
        raise CallError(f"not JSON: {error}", wrong_at) from error
    return end


def _end_after_close(family: Family, answer: str, json_end: int) -> int:
    """Return the index after the close marker of a call, if the family has one.

    Raises:
        CallError: The marker does not follow the call's JSON.
    """
    close = family.close
    if not close:
        return json_end
    close_start = skip(answer, json_end, r"\s`")
    if not answer.startswith(close, close_start):
        raise CallError(f"the call does not end with {close}", json_end)
    return close_start + len(close)


def _calls_in_json(family: Family, body: str, raw: str, at: int) -> list[ParsedCall]:
    """Return the calls of an object or a list, with their names inside.

    The first has the whole text, each other its own name and arguments.
    """
    objects_json = body if body[0] == "[" else f"[{body}]"
    rule = 'a call must be an object with a "name"'
    calls = list[ParsedCall]()
    for fields in _decoded(_decode_calls, objects_json, rule=rule, at=at):
        arguments = bytes(getattr(fields, family.key)).decode()
        call = ParsedCall(
            id=str(fields.id),
            name=fields.name,
            arguments=arguments,
            raw=f", {fields.name}{arguments}" if calls else raw,
        )
        calls.append(call)
    return calls


def read_tags(family: Family, answer: str, at: int, tools: ToolSchemas) -> MarkedPart:
    """Read a call whose arguments are tags with unquoted values."""
    tail = re.compile(family.tail).search(answer, at)
    if tail is None:
        raise CallError(f"the call does not end with {family.close}")
    head = re.compile(family.head).match(answer, at, tail.start())
    begin = head.end() if head else at
    body = answer[begin : tail.start()]
    before, *tags = body.split(family.tag)
    arguments = [re.fullmatch(family.argument, tag, re.DOTALL) for tag in tags]
    pairs = [argument.group("key", "value") for argument in arguments if argument]
    is_complete = len(pairs) == len(tags)
    if not head or not is_complete or before.strip():
        raise CallError(f"a call must have the form {family.named}…{family.close}", at)
    name = head["name"]
    schemas = _schemas_of_arguments(tools, name)
    arguments_json = {key: to_json(unquoted, _get(schemas, key)) for key, unquoted in pairs}
    fields = [f"{_json(key)}: {argument}" for key, argument in arguments_json.items()]
    end = tail.end()
    call = ParsedCall(
        id="",
        name=name,
        arguments="{" + ", ".join(fields) + "}",
        raw=answer[at:end],
    )
    return MarkedPart(end, [call])


def _schemas_of_arguments(tools: ToolSchemas, name: str) -> object:
    """Return the schemas of a tool's arguments by name; None if the tool is unknown."""
    for tool in tools:
        if _get(tool, "function", "name") == name:
            return _get(tool, "function", "parameters", "properties")
    return None


def to_json(unquoted: str, schema: object) -> str:
    """Convert an unquoted value to JSON: a string if its schema says so, or if it is not JSON."""
    kinds = {*KINDS.findall(msgspec.json.encode(schema))}
    if kinds == {b"boolean"}:
        unquoted = unquoted.lower()
    is_string = len(kinds) > 0 and kinds <= {b"string", b"null"}
    is_null = unquoted == "null" and b"null" in kinds
    if is_null or not is_string:
        with suppress(*INVALID):
            msgspec.json.decode(unquoted)
            return unquoted
    return _json(unquoted)


def _get(schema: object, *path: str) -> object:
    """Return a nested field of an object; None if it is missing."""
    for key in path:
        if not isinstance(schema, dict):
            return None
        schema = schema.get(key)
    return schema


class _Object(msgspec.Struct, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: msgspec.Raw = msgspec.Raw(b"null")
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    id: object = ""


INVALID = (ValueError, RecursionError)
"""Errors of JSON that cannot be decoded."""
KINDS = re.compile(rb'"(string|integer|number|boolean|array|object|null)"')
"""Types in a JSON schema."""
_json = json.JSONEncoder(ensure_ascii=False).encode
_decoder = json.JSONDecoder()
_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode
_Objects = Annotated[list[_Object], msgspec.Meta(min_length=1)]
_decode_calls = msgspec.json.Decoder(_Objects).decode

# ------------------------------------------------------------ families

DATA: dict[str, dict[str, Any]] = read_toml(__file__, "families.toml")
FAMILIES = {name: Family(name=name, **options) for name, options in DATA["families"].items()}
"""By name, in the order in which their markers are searched in a chat template."""
HERMES = FAMILIES["qwen2_5"]
THINK = FAMILIES["qwen3"].think
_FORMATS = [f"(?P<{name}>{pattern})" for name, pattern in DATA["foreign"].items()]
FOREIGN = re.compile("|".join(_FORMATS), re.MULTILINE)
"""Matches the start of a call in any format; the group is named as the format."""


def family_of(tokenizer: Any, name: str = "auto") -> Family:
    """Return a family by its name; "auto": by the markers in the tokenizer's chat template.

    Raises:
        UserError: The name is unknown.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if name != "auto":
        raise UserError(f"gateway.parser={name}: {unknown('family', name, ['auto', *FAMILIES])}")
    template = str(getattr(tokenizer, "chat_template", None) or "")
    family = next(family for family in FAMILIES.values() if _is_of_family(template, family))
    if not any(family.think) and THINK[0] in template:
        return replace(family, think=THINK)
    return family


def _is_of_family(template: str, family: Family) -> bool:
    """Return whether a chat template has all markers of a family."""
    return all(marker in template for marker in family.markers)


def foreign(answer: str, tool_names: Sequence[str]) -> str:
    """Detect a tool call in another format than the configured one.

    Args:
        answer: An answer without calls in the configured format.
        tool_names: Names of the tools.

    Returns:
        The format of the first call; "" if the answer holds no call.
    """
    for match in FOREIGN.finditer(answer):
        format_name = match.lastgroup or ""
        if format_name not in ("json", "pythonic"):
            return format_name
        if match[f"{format_name}_tool"] in tool_names:
            return format_name
    return ""
