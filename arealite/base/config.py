"""Load a config: YAML files and dotted overrides become one validated, frozen dataclass tree.

OmegaConf checks the types. This module converts its errors to one line, and adds the options of
registered third-party parts as typed fields.
"""

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import inf
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from arealite.base.copies import Copier
from arealite.base.errors import UserError, one_line
from arealite.base.files import replacing
from arealite.base.registry import UNNAMED, module_named

C = TypeVar("C")
M = TypeVar("M")
Tree = dict[str, Any]
"""Options as plain values."""
Parts = Mapping[type, Mapping[str, type]]
"""For each kind of part (AgentConfig, …): the config class of each registered third-party part, by
name."""
READ_ERRORS = (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError, OmegaConfBaseException)
"""Exceptions of OmegaConf for an unreadable file."""
COMPARE = {"at least": ge, "above": gt, "at most": le, "below": lt}
"""The comparison of each bound of an option (api.fields.opt)."""
LIMIT = 10**9
"""Largest absolute value of a number whose option sets no bound. A product of a few such numbers
does not overflow float32, and every timer accepts this many seconds."""
SAVED_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_hints = lru_cache(maxsize=512)(get_type_hints)


@lru_cache(maxsize=8)
def _defaults(schema: type) -> Copier[DictConfig]:
    """Return a maker of the schema's OmegaConf node. Making the first node takes the longest."""
    return Copier(OmegaConf.structured(schema))


@lru_cache(maxsize=8)
def _extended(schema: type, parts: tuple[tuple[type, tuple[tuple[str, type], ...]], ...]) -> type:
    """Return `extend(schema, parts)`; equal parts have one class, whose defaults are cached."""
    return extend(schema, {kind: dict(configs) for kind, configs in parts})


def load(
    schema: type[C],
    files: Sequence[Path],
    overrides: Sequence[str],
    parts: Parts,
    *,
    is_saved: bool = False,
    read_files: Sequence[DictConfig] | None = None,
) -> C:
    """Merge `files` and then `overrides` into the defaults of `schema`; return a frozen config.

    Args:
        schema: The root config class.
        files: YAML files; later ones win.
        overrides: Items like "a.b=1"; they win over files.
        parts: The third-party parts.
        is_saved: Another version may have written `files`: keys that `schema` does not have are
            ignored, and former values are read under their new names.
        read_files: The results of `read` for `files`; None: they are read here.

    Raises:
        UserError: A file is missing or is not YAML, a key is unknown, or a value has the wrong type
            or is out of range.
    """
    grown = _extended(schema, tuple((kind, tuple(parts[kind].items())) for kind in parts))
    node = _defaults(grown).copy()
    contents = [read(file) for file in files] if read_files is None else read_files
    layers = [(str(file), content) for file, content in zip(files, contents, strict=True)]
    for _, layer in layers if is_saved else []:
        convert_saved(layer, grown)
    for source, layer in [*layers, ("command line", dotlist(overrides))]:
        try:
            node = OmegaConf.unsafe_merge(node, layer) if layer else node
        except OmegaConfBaseException as error:
            raise UserError(f"{source}: {explain(error, grown)}") from error
    try:
        config = cast(C, OmegaConf.to_object(node))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, grown)) from error
    check_ranges(config)
    return config


def without_defaults(layer: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of a config file that differ from the defaults, as plain values."""
    changed = dict[str, Any]()
    for name, value in layer.items():
        default = defaults.get(name)
        if value and default and _is_tree(value) and _is_tree(default):
            if inner := without_defaults(value, default):
                changed[name] = inner
        elif name not in defaults or repr(value) != repr(default):  # 1, 1.0 and True are equal
            changed[name] = value
    return changed


def _is_tree(value: object) -> TypeGuard[Tree]:
    return isinstance(value, dict)


def convert_saved(layer: object, schema: object) -> None:
    """Remove keys from `layer` that the config class `schema` does not have; rename old values."""
    if not (isinstance(layer, DictConfig) and dataclasses.is_dataclass(schema)):
        return
    hints = _hints(schema)
    items = {item.name: item for item in dataclasses.fields(schema)}
    for key in [*layer]:
        if key not in hints:
            del layer[key]
        elif (new := _new_name(items[key], layer[key])) is not None:
            layer[key] = new
        elif (inner := element(hints[key])) and isinstance(layer[key], DictConfig):
            for part in layer[key].values():
                convert_saved(part, inner)
        else:
            convert_saved(layer[key], hints[key])


def nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key with a trailing dot, config object) of a tree, the root included."""
    yield prefix, config
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        inner = {"": value}
        if isinstance(value, dict):
            inner = {f"{name}.": each for name, each in cast(dict[str, object], value).items()}
        for name, each in inner.items():
            if dataclasses.is_dataclass(each):
                yield from nodes(each, f"{prefix}{item.name}.{name}")


def check_ranges(config: object) -> None:
    """Check every number of a config tree against the range of its option.

    Raises:
        UserError: A number is out of range or not finite, or its absolute value exceeds LIMIT and
            the option sets no bound.
    """
    for prefix, node in nodes(config):
        for item in dataclasses.fields(node):
            value = getattr(node, item.name)
            limits = {"at least": -LIMIT, "at most": LIMIT} | item.metadata.get("bounds", {})
            bounds = [(COMPARE[word], at) for word, at in limits.items()]
            wrong = [n for n in _numbers(value) if not all(holds(n, at) for holds, at in bounds)]
            if not wrong:
                continue
            what = range_of(item)
            if LIMIT < abs(wrong[0]) < inf:
                what = " and ".join(f"{word} {at}" for word, at in limits.items() if at > -inf)
            if isinstance(value, float):
                what = f"a number {'of ' if what.startswith('at') else ''}{what}".rstrip()
            is_optional = type(None) in get_args(_hints(node.__class__)[item.name])
            what += ", or null" if is_optional else ""
            raise UserError(f"{prefix}{item.name}={value} must be {what}.")


def check_constraints(config: object, prefix: str) -> None:
    """Check the constraints between options of the config tree below the key `prefix`.

    A config class defines them in its method `constraints`, which yields pairs of (whether the
    constraint holds, error). The error begins with an option's name.

    Raises:
        UserError: A constraint does not hold; the message is its error.
    """
    for key, node in nodes(config, prefix):
        for holds, error in node.constraints() if hasattr(node, "constraints") else ():
            if not holds:
                raise UserError(f"{key}{error}")


def _numbers(value: object) -> list[float]:
    """Return every number in a value: in a number, and in nested lists and dicts."""
    inner: Any = cast(dict[object, object], value).values() if isinstance(value, dict) else value
    if isinstance(value, list | tuple | dict):
        return [number for each in inner for number in _numbers(each)]
    return [value] if isinstance(value, int | float) else []


def read(file: Path) -> DictConfig:
    """Read a YAML file. An empty file is an empty config.

    Raises:
        UserError: The file is missing or unreadable, or is not a mapping.
    """
    return _read(file, OmegaConf.load, DictConfig)


def read_saved(file: Path) -> dict[str, Any]:
    """Read the file of `save` as plain values: it is complete, and has no interpolations.

    Ten times as fast as `read`.

    Raises:
        UserError: See read.
    """
    return _read(file, lambda path: yaml.load(path.read_bytes(), SAVED_LOADER), dict[str, Any])


def _read(file: Path, read: Callable[[Path], object], mapping: type[M]) -> M:
    if not os.path.isfile(file):  # reading a FIFO would block, a device may have no end
        what = "does not exist or is not a regular file"
        raise UserError(f"config file {file} {what}. Name another with --config.")
    try:
        content = read(file)
    except READ_ERRORS as error:
        what = f"config file {file} is not readable YAML"
        raise UserError(f"{what}: {one_line(error)}") from error
    if not isinstance(content, get_origin(mapping) or mapping):
        raise UserError(f"config file {file} must hold `key: value` pairs.")
    return cast(M, content)


def dotlist(overrides: Sequence[str]) -> DictConfig:
    """Parse dotted overrides.

    Raises:
        UserError: An override is not of the form `key=value`.
    """
    for item in overrides:
        if "=" not in item or item.startswith(("-", "=")):
            fix = "Write key=value, for example trainer.ppo.lr=1e-5."
            raise UserError(f"'{item}' is not an override. {fix}")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"an override cannot be parsed: {one_line(error)}") from error


def save(config: Any, *files: Path) -> None:
    """Write the whole resolved config as YAML, each file atomically."""
    text = _as_yaml(dataclasses.asdict(config))
    for file in files:
        with replacing(file) as temporary:
            temporary.write_text(text)


def save_changes(config: Any, file: Path) -> None:
    """Write the options without their default values, for a process that may know fewer parts."""
    file.write_text(_as_yaml(_changed(config, None, dataclasses.asdict(config))))


def _changed(config: Any, default: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `tree`, the options of `config`, that differs from the defaults."""
    if type(default) is not type(config):  # extended by third-party parts
        default = type(config)()
    changed = dict[str, Any]()
    for name, options in tree.items():
        value = getattr(config, name)
        usual = getattr(default, name)
        if dataclasses.is_dataclass(value):
            if inner := _changed(value, usual, options):
                changed[name] = inner
        elif value != usual:
            changed[name] = options
    return changed


def _as_yaml(tree: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def values(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield each value of a tree with its dotted key."""
    inner = cast(dict[str, object], value) if isinstance(value, dict) else {}
    if not inner:
        yield key, str(cast(object, value))
    for name, each in inner.items():
        yield from values(f"{key}.{name}" if key else name, each)


def changes(file: Path, config: Any) -> Iterator[str]:
    """Yield each option that has another value in a saved config, as `key=value (was value)`."""
    before = dict(values("", read_saved(file)))
    for key, value in values("", yaml.load(_as_yaml(dataclasses.asdict(config)), SAVED_LOADER)):
        if before.get(key, value) != value:
            yield f"{key}={value} (was {before[key]})"


def extend(schema: type, parts: Parts) -> type:
    """Return a subclass of `schema` that also has the options of third-party parts.

    Nested config classes are extended in the same way. A class without changes is returned itself.
    """
    fields: list[tuple[str, object, object]] = []
    hints = _hints(schema)
    for item in dataclasses.fields(schema):
        annotation = hints[item.name]
        inner = element(annotation)
        if inner is not None and (grown := extend(inner, parts)) is not inner:
            values = dataclasses.field(default_factory=dict[str, object], metadata=item.metadata)
            fields.append((item.name, dict[str, grown], values))
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            grown = extend(annotation, parts)
            if grown is not annotation:
                new = dataclasses.field(default_factory=grown, metadata=item.metadata)
                fields.append((item.name, grown, new))
    for name, config in parts.get(schema, {}).items():
        help_text = {"help": f"options of type={name}"}
        fields.append((name, config, dataclasses.field(default_factory=config, metadata=help_text)))
    if not fields:
        return schema
    return dataclasses.make_dataclass(
        schema.__name__, fields, bases=(schema,), frozen=True, kw_only=True
    )


def element(annotation: object) -> type | None:
    """Return the config class of the values of a dict field; None for other fields."""
    value = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return value if isinstance(value, type) and dataclasses.is_dataclass(value) else None


def keys(schema: type) -> Iterator[tuple[str, object, str]]:
    """Yield (dotted key, default, help and range) of every option of a config class."""
    for path, item, _ in leaves(schema):
        factory = item.default_factory
        default = item.default if factory is dataclasses.MISSING else factory()
        texts = (str(item.metadata.get("help", "")), range_of(item))
        yield path, default, "; ".join(filter(None, texts))


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (dotted key, field, type) of every option of a config class."""
    hints = _hints(schema)
    for item in dataclasses.fields(schema):
        annotation = hints[item.name]
        path = f"{prefix}{item.name}"
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            yield from leaves(annotation, f"{path}.")
        else:
            yield path, item, annotation


def explain(error: OmegaConfBaseException, schema: type) -> str:
    """Convert an OmegaConf error to one line with the key, the error and a suggestion."""
    key = error.full_key or ""
    if isinstance(error, ConfigKeyError):
        name = key.rpartition(".")[2]
        module = module_named(name)
        own = f" If {name} is your own, add imports=[{module}]." if module != UNNAMED else ""
        return f"unknown key '{key}'.{_suggest(key, schema)}{own}"
    old: object = getattr(error, "value", None)
    if new := next((_new_name(f, old) for path, f, _ in leaves(schema) if path == key), None):
        return f"{key}={old} is called {new} now. Write {key}={new}."
    what = str(error.msg or error).splitlines()[0]
    if "value 'None'" in what or "is not Optional" in what:
        empty = f"""{key}='""'"""
        return f"{key} has no value. Write {key}=VALUE, or remove it; {empty} is an empty text."
    return f"{key}: {what}." if key else f"{what}."


def range_of(item: dataclasses.Field[object]) -> str:
    """Return a field's range in words, like "above 0 and at most 1"; "" without a range."""
    bounds = item.metadata.get("bounds", {}).items()
    return " and ".join(f"{word} {at}" for word, at in bounds if at > -inf)


def _new_name(item: dataclasses.Field[object], value: object) -> str | None:
    """Return the new name of a former value of an option; None for any other value."""
    return item.metadata.get("renamed", {}).get(value) if isinstance(value, str) else None


def _suggest(key: str, schema: type) -> str:
    known = [path for path, _, _ in keys(schema)]
    sections = {path.rsplit(".", n)[0] for path in known for n in range(1, path.count(".") + 1)}
    known += sorted(sections)
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [path for path in known if path.rsplit(".", 1)[-1] == leaf]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    typo_of = difflib.get_close_matches(key, close, cutoff=0.9)  # differs by a letter or two
    near = typo_of or same_leaf or close
    return f" Did you mean '{near[0]}'?" if near else ""
