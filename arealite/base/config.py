"""Load a config: YAML files and dotted overrides become one validated, frozen dataclass tree.

OmegaConf checks the types. This module converts its errors to one line, and adds the options of
registered third-party parts as typed fields.
"""

import copy
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

from arealite.base.errors import UserError, one_line
from arealite.base.files import replacing
from arealite.base.registry import UNNAMED, module_named

C = TypeVar("C")
M = TypeVar("M")
Tree = dict[str, Any]
"""Options as plain values."""
PartConfigs = Mapping[str, Mapping[str, type]]
"""For each kind of part ("agent", …): the config class of each registered third-party part, by
name."""
PartsKey = tuple[tuple[str, tuple[tuple[str, type], ...]], ...]
"""The pairs of `PartConfigs`, which can be the key of a cache."""
READ_ERRORS = (
    OSError,
    UnicodeDecodeError,
    RecursionError,
    yaml.YAMLError,
    OmegaConfBaseException,
)
"""Exceptions of OmegaConf for an unreadable file."""
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
SAVED_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_hints = lru_cache(maxsize=512)(get_type_hints)


@lru_cache(maxsize=8)
def _defaults(schema: type) -> DictConfig:
    """Return the schema's OmegaConf node. Making it takes six times as long as a copy."""
    return OmegaConf.structured(schema)


@lru_cache(maxsize=8)
def _extended(schema: type, parts: PartsKey) -> type:
    """Return `extend(schema, parts)`; equal parts have one class, whose defaults are cached."""
    configs_by_kind = {kind: dict(configs) for kind, configs in parts}
    return extend(schema, configs_by_kind)


def load(
    schema: type[C],
    files: Sequence[Path],
    overrides: Sequence[str],
    parts: PartConfigs,
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
    parts_key = tuple((kind, tuple(configs.items())) for kind, configs in parts.items())
    grown = _extended(schema, parts_key)
    node = copy.deepcopy(_defaults(grown))
    if read_files is None:
        read_files = [read(file) for file in files]
    if is_saved:
        for content in read_files:
            convert_saved(content, grown)
    sources = [str(file) for file in files]
    layers = list(zip(sources, read_files, strict=True))
    layers.append(("command line", dotlist(overrides)))
    for source, layer in layers:
        try:
            if layer:
                node = OmegaConf.unsafe_merge(node, layer)
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
            changed_inside = without_defaults(value, default)
            if changed_inside:
                changed[name] = changed_inside
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
            continue
        new_name = _new_name(items[key], layer[key])
        element_schema = element(hints[key])
        if new_name is not None:
            layer[key] = new_name
        elif element_schema and isinstance(layer[key], DictConfig):
            for part in layer[key].values():
                convert_saved(part, element_schema)
        else:
            convert_saved(layer[key], hints[key])


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
    annotation = _hints(node.__class__)[item.name]
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

    def load_yaml(path: Path) -> object:
        return yaml.load(path.read_bytes(), SAVED_LOADER)

    return _read(file, load_yaml, dict[str, Any])


def _read(file: Path, read: Callable[[Path], object], mapping: type[M]) -> M:
    if not os.path.isfile(file):  # reading a FIFO would block, a device may have no end
        raise UserError(
            f"config file {file} does not exist or is not a regular file. "
            "Name another with --config."
        )
    try:
        content = read(file)
    except READ_ERRORS as error:
        reason = one_line(error)
        raise UserError(f"config file {file} is not readable YAML: {reason}") from error
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
            raise UserError(
                f"'{item}' is not an override. Write key=value, for example trainer.ppo.lr=1e-5."
            )
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"{_unparsed(overrides)}: {one_line(error)}") from error


def _unparsed(overrides: Sequence[str]) -> str:
    """Return an error for the first override whose value is no YAML; how to write it as a text."""
    for item in overrides:
        try:
            OmegaConf.from_dotlist([item])
        except (OmegaConfBaseException, yaml.YAMLError):
            key, _, value = item.partition("=")
            quoted = f"""{key}='"{value}"'"""
            return f"{item}: the override cannot be parsed. As a text in a shell: {quoted}"
    return "an override cannot be parsed"


def unresolved(layer: DictConfig) -> object:
    """Return a layer as plain values, its interpolations as texts."""
    return OmegaConf.to_container(layer, resolve=False)


def save(config: Any, *files: Path) -> None:
    """Write the whole resolved config as YAML, each file atomically."""
    content = _as_yaml(dataclasses.asdict(config))
    for file in files:
        with replacing(file) as temporary:
            temporary.write_text(content)


def save_changes(config: Any, file: Path) -> None:
    """Write the options without their default values, for a process that may know fewer parts."""
    changed = _changed(config, None, dataclasses.asdict(config))
    file.write_text(_as_yaml(changed))


def _changed(config: Any, default: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `tree`, the options of `config`, that differs from the defaults."""
    if type(default) is not type(config):  # extended by third-party parts
        default = type(config)()
    changed = dict[str, Any]()
    for name, options in tree.items():
        value = getattr(config, name)
        usual = getattr(default, name)
        if dataclasses.is_dataclass(value):
            changed_inside = _changed(value, usual, options)
            if changed_inside:
                changed[name] = changed_inside
        elif value != usual:
            changed[name] = options
    return changed


def _as_yaml(tree: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def values(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield each value of a tree with its dotted key."""
    if not isinstance(value, dict) or not value:
        yield key, str(cast(object, value))
        return
    children = cast(dict[str, object], value)
    for name, child in children.items():
        child_key = f"{key}.{name}" if key else name
        yield from values(child_key, child)


def changes(file: Path, config: Any) -> Iterator[str]:
    """Yield each option that has another value in a saved config, as `key=value (was value)`."""
    before = dict(values("", read_saved(file)))
    present = yaml.load(_as_yaml(dataclasses.asdict(config)), SAVED_LOADER)
    for key, value in values("", present):
        if before.get(key, value) != value:
            yield f"{key}={value} (was {before[key]})"


def extend(schema: type, parts: PartConfigs) -> type:
    """Return a subclass of `schema` that also has the options of third-party parts.

    Nested config classes are extended in the same way. A class without changes is returned itself.
    """
    fields: list[tuple[str, object, object]] = []
    hints = _hints(schema)
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
        hint = _part_hint(_leaf(key), error.object_type)
        return f"unknown key '{key}'.{_suggest(key, schema)}{hint}"
    old_value: object = getattr(error, "value", None)
    for path, item, _ in leaves(schema):
        new_name = _new_name(item, old_value)
        if path == key and new_name:
            return f"{key}={old_value} is called {new_name} now. Write {key}={new_name}."
    problem = str(error.msg or error).splitlines()[0]
    if "value 'None'" in problem or "is not Optional" in problem:
        empty = f"""{key}='""'"""
        return f"{key} has no value. Write {key}=VALUE, or remove it; {empty} is an empty text."
    return f"{key}: {problem}." if key else f"{problem}."


def _part_hint(name: str, section: Any) -> str:
    """Return how the options of a part `name` become known; "" if `section` has no parts."""
    module = module_named(name)
    if module != UNNAMED:
        return f" If {name} is your own, add imports=[{module}]."
    kinds = {}
    if dataclasses.is_dataclass(section):
        kinds = {item.name: kind_of(item) for item in dataclasses.fields(section)}
    if not any(kinds.values()) or difflib.get_close_matches(name, kinds):
        return ""
    return (
        f" If {name} is a part of another package, install the package, with the extra that offers "
        f"{name}; `arealite info` lists all installed parts."
    )


def range_of(item: dataclasses.Field[object]) -> str:
    """Return a field's range in words, like "above 0 and at most 1"; "" without a range."""
    return _in_words(item.metadata.get("bounds", {}))


def _new_name(item: dataclasses.Field[object], value: object) -> str | None:
    """Return the new name of a former value of an option; None for any other value."""
    if not isinstance(value, str):
        return None
    new_names = item.metadata.get("renamed", {})
    return new_names.get(value)


def _suggest(key: str, schema: type) -> str:
    """Return the question whether another key of the schema was meant; "" if none is similar."""
    options = [path for path, _, _ in keys(schema)]
    sections = set[str]()
    for option in options:
        section, _, _ = option.rpartition(".")
        while section:
            sections.add(section)
            section, _, _ = section.rpartition(".")
    paths = options + sorted(sections)
    same_leaf = [path for path in paths if _leaf(path) == _leaf(key)]
    close = difflib.get_close_matches(key, paths, n=1, cutoff=0.5)
    typo_of = difflib.get_close_matches(key, close, cutoff=0.9)  # differs by a letter or two
    similar = typo_of or same_leaf or close
    return f" Did you mean '{similar[0]}'?" if similar else ""


def _leaf(key: str) -> str:
    """Return the last name of a dotted key."""
    return key.rpartition(".")[2]
