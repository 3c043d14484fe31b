"""A tree of frozen config objects: its classes, ranges and constraints, and the file of a process.

A command checks its options once, and writes the resolved tree for the processes that it starts.
They read it here, without YAML and OmegaConf.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import inf
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from arealite.base.errors import UserError, one_line
from arealite.base.files import replacing

C = TypeVar("C")
Tree = dict[str, Any]
"""Options as plain values."""
PartConfigs = Mapping[str, Mapping[str, type]]
"""For each kind of part ("agent", …): the config class of each registered third-party part, by
name."""
SUFFIX = ".msgpack"
"""Suffix of the file of a resolved tree."""
COMPARE = {
    "at least": ge,
    "above": gt,
    "at most": le,
    "below": lt,
}
"""The comparison of each bound of an option (api.fields.opt)."""
LIMIT = 10**9
"""Largest absolute value of a number whose option sets no bound. A product of a few such numbers
does not overflow float32, and every timer accepts this many seconds."""
hints_of = lru_cache(maxsize=512)(get_type_hints)
"""Return the type of each option of a config class."""
_extended: dict[object, Any] = {}
"""Results of `extended`."""


def nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key with a trailing dot, config object) of a tree, the root included."""
    yield prefix, config
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        children = {"": value}
        if isinstance(value, dict):
            elements = cast(dict[str, object], value)
            children = {f"{name}.": child for name, child in elements.items()}
        for name, child in children.items():
            if dataclasses.is_dataclass(child):
                yield from nodes(child, f"{prefix}{item.name}.{name}")


def values(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield each value of a tree with its dotted key."""
    if not isinstance(value, dict) or not value:
        yield key, str(cast(object, value))
        return
    children = cast(dict[str, object], value)
    for name, child in children.items():
        child_key = f"{key}.{name}" if key else name
        yield from values(child_key, child)


def check_ranges(config: object) -> None:
    """Check every number of a config tree against the range of its option.

    Raises:
        UserError: A number is out of range or not finite, or its absolute value exceeds LIMIT and
            the option sets no bound.
    """
    for prefix, node in nodes(config):
        for item in dataclasses.fields(node):
            value = getattr(node, item.name)
            limits = _limits(item)
            outside = [number for number in _numbers(value) if not _is_within(number, limits)]
            if outside:
                rule = _rule(item, node, outside[0])
                raise UserError(f"{prefix}{item.name}={value} must be {rule}.")


def _limits(item: dataclasses.Field[Any]) -> Mapping[str, float]:
    """Return the limits of an option: its bounds, and LIMIT on a side without a bound."""
    limits: dict[str, float] = {"at least": -LIMIT, "at most": LIMIT}
    return limits | item.metadata.get("bounds", {})


def _rule(item: dataclasses.Field[Any], node: object, number: float) -> str:
    """Return the rule that `number`, in the value of an option of `node`, breaks."""
    rule = range_of(item)
    exceeds_limit = LIMIT < abs(number) < inf
    if exceeds_limit:
        rule = _in_words(_limits(item))
    if isinstance(getattr(node, item.name), float):
        preposition = "of " if rule.startswith("at") else ""
        rule = f"a number {preposition}{rule}".rstrip()
    annotation = hints_of(node.__class__)[item.name]
    is_optional = type(None) in get_args(annotation)
    return f"{rule}, or null" if is_optional else rule


def _is_within(number: float, limits: Mapping[str, float]) -> bool:
    """Return whether a number keeps limits like {"at least": 0}."""
    return all(COMPARE[comparison](number, limit) for comparison, limit in limits.items())


def _in_words(limits: Mapping[str, float]) -> str:
    """Return limits as text, like "at least 0 and below 1"."""
    words = [f"{comparison} {limit}" for comparison, limit in limits.items() if limit > -inf]
    return " and ".join(words)


def check_constraints(config: object, prefix: str) -> None:
    """Check the constraints between options of the config tree below the key `prefix`.

    A config class defines them in its method `constraints`, which yields pairs of (whether the
    constraint holds, error). The error begins with an option's name.

    Raises:
        UserError: A constraint does not hold; the message is its error.
    """
    for key, node in nodes(config, prefix):
        if not hasattr(node, "constraints"):
            continue
        for holds, error in node.constraints():
            if not holds:
                raise UserError(f"{key}{error}")


def _numbers(value: object) -> list[float]:
    """Return every number in a value: in a number, and in nested lists and dicts."""
    if isinstance(value, int | float):
        return [value]
    if isinstance(value, dict):
        elements = list(cast(dict[object, object], value).values())
    elif isinstance(value, list | tuple):
        elements = cast(Sequence[object], value)
    else:
        return []
    return [number for element in elements for number in _numbers(element)]


def extended(schema: type[C], parts: PartConfigs) -> type[C]:
    """Return `extend(schema, parts)`; equal parts have one class."""
    key = (schema, *((kind, *table.items()) for kind, table in parts.items()))
    if key not in _extended:
        _extended[key] = extend(schema, parts)
    return _extended[key]


def extend(schema: type, parts: PartConfigs) -> type:
    """Return a subclass of `schema` that also has the options of third-party parts.

    Nested config classes are extended in the same way. A class without changes is returned itself.
    """
    fields: list[tuple[str, object, object]] = []
    hints = hints_of(schema)
    for item in dataclasses.fields(schema):
        annotation = hints[item.name]
        element_schema = element(annotation)
        if element_schema is not None:
            grown = extend(element_schema, parts)
            if grown is not element_schema:
                values = dataclasses.field(
                    default_factory=dict[str, object],
                    metadata=item.metadata,
                )
                fields.append((item.name, dict[str, grown], values))
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            grown = extend(annotation, parts)
            if grown is not annotation:
                section = dataclasses.field(default_factory=grown, metadata=item.metadata)
                fields.append((item.name, grown, section))
        for name, config in parts.get(kind_of(item), {}).items():
            help_text = {"help": f"options of type={name}"}
            section = dataclasses.field(default_factory=config, metadata=help_text)
            fields.append((name, config, section))
    if not fields:
        return schema
    return dataclasses.make_dataclass(
        schema.__name__,
        fields,
        bases=(schema,),
        frozen=True,
        kw_only=True,
    )


def kind_of(item: dataclasses.Field[Any]) -> str:
    """Return the kind of part of which an option has registered names; "" for other options."""
    return item.metadata.get("names", "")


def element(annotation: object) -> type | None:
    """Return the config class of the values of a dict field; None for other fields."""
    if get_origin(annotation) is not dict:
        return None
    value_type = get_args(annotation)[1]
    if isinstance(value_type, type) and dataclasses.is_dataclass(value_type):
        return value_type
    return None


def keys(schema: type) -> Iterator[tuple[str, object, str]]:
    """Yield (dotted key, default, help and range) of every option of a config class."""
    for path, item, _ in leaves(schema):
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        help_text = str(item.metadata.get("help", ""))
        texts = filter(None, [help_text, range_of(item)])
        yield path, default, "; ".join(texts)


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (dotted key, field, type) of every option of a config class."""
    hints = hints_of(schema)
    for item in dataclasses.fields(schema):
        annotation = hints[item.name]
        path = f"{prefix}{item.name}"
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            yield from leaves(annotation, f"{path}.")
        else:
            yield path, item, annotation


def range_of(item: dataclasses.Field[object]) -> str:
    """Return a field's range in words, like "above 0 and at most 1"; "" without a range."""
    return _in_words(item.metadata.get("bounds", {}))


def plain(config: Any) -> Tree:
    """Return the options of a config as plain values."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(config, enc_hook=str), type=Tree)


def build(schema: type[C], tree: Tree) -> C:
    """Return the config of class `schema` with the options `tree` that `schema` has.

    Raises:
        UserError: An option has the wrong type.
    """
    try:
        return msgspec.convert(tree, schema, dec_hook=lambda kind, text: kind(text))
    except msgspec.ValidationError as error:
        problem, _, path = one_line(error).partition(" - at `$.")
        key = path.rstrip("`")
        raise UserError(f"{key}: {problem}." if key else f"{problem}.") from error


def write(config: object, file: Path) -> None:
    """Write a resolved config for other processes, which read it with `read` and `build`."""
    with replacing(file) as temporary:
        temporary.write_bytes(msgspec.msgpack.encode(config, enc_hook=str))


def read(file: Path) -> Tree:
    """Read a file of `write`.

    Raises:
        UserError: The file is missing, or is no such file.
    """
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=Tree)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"{file} is no resolved config: {one_line(error)}. "
            "`arealite train` writes it into the run's folder at each start."
        ) from error


def field_names(config: object) -> Sequence[str]:
    """Return the names of a config's options; none for an object that is no config."""
    return [*getattr(config, "__dataclass_fields__", ())]
