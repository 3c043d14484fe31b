"""Compiles and renders chat templates as transformers does, without importing it."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from arealite.ext.light_tokenizer.tokenizer_folder import UnsupportedError

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""The keys under which a message can have its thought; templates read the first two."""


class _Generation(Extension):
    """The block `generation` around what the model samples: it renders its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The name `dict` in a template, without the attributes of the class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` can be one of the names
        namespace, *positional = args
        values = dict(*positional, **values)
        for name in values:
            _check_name(name)
        Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template has the name {name!r}. Rename it.")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; jinja2's own filter escapes characters of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(maxsize=128)
def compile_template(source: str) -> Any:
    """Compile a chat template in a sandbox, with the names and filters that transformers offers."""
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(source)


def render_chat(source: str, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
    """Render messages with a chat template.

    Args:
        source: The template.
        messages: The conversation.
        variables: The template's other variables: tools, documents, special tokens, and so on.

    Raises:
        UnsupportedError: The input has values that are no plain data, functions as tools, several
            conversations, or a fault. transformers handles or reports it.
    """
    tools = variables["tools"] or ()
    documents = variables["documents"] or ()
    has_dicts = all(type(item) is dict for item in [*messages, *tools, *documents])
    is_plain = _is_plain([messages, dict(variables)])
    if not messages or not is_plain or not has_dicts:
        raise UnsupportedError("apply_chat_template")
    chat = [_prepare(message) for message in messages]
    return compile_template(source).render(messages=chat, **variables)


def _prepare(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without its None values; its thought has both keys that templates read."""
    prepared = {key: value for key, value in message.items() if value is not None}
    thoughts = [prepared[key] for key in REASONING_KEYS if key in prepared]
    if not thoughts:
        return prepared
    thought = thoughts[0]
    return {
        "thinking": thought,
        **prepared,
        "reasoning_content": thought,
    }


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of JSON's types and tuples."""
    if type(value) is dict:
        items = cast(dict[Any, Any], value)
        contents = [*items.keys(), *items.values()]
        return all(map(_is_plain, contents))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
