"""Model families: how their answers contain thoughts and tool calls. Their data: families.toml."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from arealite.base.data import read_toml
from arealite.base.errors import UserError
from arealite.base.registry import unknown
from arealite.impl.gateway.exchange import Call

Tools = Sequence[dict[str, Any]]
"""OpenAI function schemas: {"type": "function", "function": {"name", "parameters", …}}."""


class Part(NamedTuple):
    """The calls that begin at a marker or, without calls, the header of a thought or a text."""

    end: int
    """Index after the part."""
    calls: Sequence[Call] = ()
    """Their ids are the model's own; "" without one."""
    mode: str = "start"
    """What follows: "start" (anything), "thought" or "text"."""


class CallError(Exception):
    """A call that cannot be read.

    Args:
        why: The reason.
        at: Index after which the call's close marker is searched; None: a close marker in the text
            so far may belong to an argument.
    """

    def __init__(self, why: str, at: int | None = None) -> None:
        super().__init__(why)
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

    def opening(self, tool: str | None) -> str:
        """Return the text that begins a call of a tool, or of any; "" if it cannot be forced."""
        return self.named.partition("{name}")[0] if not tool else self.named.replace("{name}", tool)

    def parse(self, text: str, at: int, tools: Tools) -> Part:
        """Read the part at the marker at an index.

        Raises:
            CallError: A call is malformed or not complete.
        """
        part = (read_tags if self.tag else read_json)(self, text, at, tools)
        for call in part.calls:
            _checked(_decode_object, call.arguments, f'"{self.key}" must be an object', at)
        return part


# ------------------------------------------------------------ readers


def skip(text: str, at: int, characters: str) -> int:
    """Return the index after characters, the inside of a regular expression's [...]."""
    found = re.compile(f"[^{characters}]").search(text, at)
    return found.start() if found else len(text)


def _checked(decode: Callable[[str], Any], text: str, rule: str, at: int) -> Any:
    try:
        return decode(text)
    except INVALID as error:
        why = rule if isinstance(error, msgspec.ValidationError) else "not JSON"
        raise CallError(f"{why}: {error}", at) from error


def read_json(family: Family, text: str, at: int, tools: Tools) -> Part:
    """Read calls that are JSON, or whose arguments are; or the header of a message."""
    if (head := re.compile(family.head).match(text, at)) is None:
        raise CallError(f"a call must have the form {family.named}…{family.close}")
    begin = head.end()
    close = family.close
    if family.has_channels and not head["name"]:
        return Part(begin, mode="thought" if head["channel"] == "analysis" else "text")
    try:
        end = after = _decoder.raw_decode(text, begin)[1]
    except (ValueError, RecursionError) as error:
        is_open = str(error).startswith("Unterminated")  # a close marker may be inside a string
        wrong = None if is_open else getattr(error, "pos", begin)
        raise CallError(f"not JSON: {error}", wrong) from error
    if close and not text.startswith(close, after := skip(text, end, r"\s`")):
        raise CallError(f"the call does not end with {close}", end)
    body = text[begin:end]
    raw = text[at : after + len(close)]
    calls = list[Call]()
    if name := (named := head.groupdict()).get("name"):
        calls.append(Call(named.get("id") or "", name, body, raw=raw))
    else:
        listed = body if body[0] == "[" else f"[{body}]"
        for each in _checked(_decode_calls, listed, 'a call must be an object with a "name"', at):
            arguments = bytes(getattr(each, family.key)).decode()
            calls.append(Call(str(each.id), each.name, arguments, raw=raw))
            raw = f", {each.name}{arguments}"
    return Part(after + len(close), calls)


def read_tags(family: Family, text: str, at: int, tools: Tools) -> Part:
    """Read a call whose arguments are tags with unquoted values."""
    if (end := re.compile(family.tail).search(text, at)) is None:
        raise CallError(f"the call does not end with {family.close}")
    head = re.compile(family.head).match(text, at, end.start())
    before, *tags = text[head.end() if head else at : end.start()].split(family.tag)
    found = [re.fullmatch(family.argument, each, re.DOTALL) for each in tags]
    pairs = [argument.group("key", "value") for argument in found if argument]
    if not head or before.strip() or len(pairs) < len(tags):
        raise CallError(f"a call must have the form {family.named}…{family.close}", at)
    named = (tool for tool in tools if _get(tool, "function", "name") == head["name"])
    schemas = _get(next(named, None), "function", "parameters", "properties")
    values = {key: to_json(value, _get(schemas, key)) for key, value in pairs}
    arguments = "{" + ", ".join(f"{_json(key)}: {value}" for key, value in values.items()) + "}"
    return Part(end.end(), [Call("", head["name"], arguments, raw=text[at : end.end()])])


def to_json(value: str, schema: object) -> str:
    """Convert an unquoted value to JSON: a string if its schema says so, or if it is not JSON."""
    kinds = {*KINDS.findall(msgspec.json.encode(schema))}
    if kinds == {b"boolean"}:
        value = value.lower()
    if not kinds or not kinds <= {b"string", b"null"} or (value == "null" and b"null" in kinds):
        with suppress(*INVALID):
            msgspec.json.decode(value)
            return value
    return _json(value)


def _get(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


class _Object(msgspec.Struct):
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
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_decode_calls = msgspec.json.Decoder(Annotated[list[_Object], msgspec.Meta(min_length=1)]).decode

# ------------------------------------------------------------ families

DATA: dict[str, dict[str, Any]] = read_toml(__file__, "families.toml")
FAMILIES = {name: Family(name=name, **options) for name, options in DATA["families"].items()}
HERMES = FAMILIES["qwen2_5"]
THINK = FAMILIES["qwen3"].think
FOREIGN = re.compile("|".join(f"(?P<{k}>{v})" for k, v in DATA["foreign"].items()), re.MULTILINE)


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
    family = next(each for each in FAMILIES.values() if all(m in template for m in each.markers))
    return family if any(family.think) or THINK[0] not in template else replace(family, think=THINK)


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
        if name not in ("json", "pythonic") or found[f"{name}_tool"] in known:
            return name
    return ""
