"""Load a config: YAML files and dotted overrides become one validated, frozen dataclass tree.

Only commands use this module, and each reads a file once. OmegaConf merges the files and checks the
types; this module converts its errors to one line. `config_tree` hands the result to processes.
"""

import copy
import dataclasses
import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from arealite.base import config_tree
from arealite.base.config_tree import (
    PartConfigs,
    Tree,
    element,
    hints_of,
    keys,
    kind_of,
    leaves,
    values,
)
from arealite.base.errors import UserError, one_line
from arealite.base.files import replacing
from arealite.base.registry import UNNAMED, module_named

C = TypeVar("C")
READ_ERRORS = (
    OSError,
    UnicodeDecodeError,
    RecursionError,
    yaml.YAMLError,
    OmegaConfBaseException,
)
"""Exceptions of OmegaConf for an unreadable file."""
_scan = cast(Any, yaml).scan
SAVED_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
COMMAND_LINE = "command line"
FORMS: dict[object, str] = {
    object: "one value: {}=VALUE",
    list: "a list: {}=[VALUE]",
    dict: "keys with values: {}.KEY=VALUE",
}
"""How the value of an option is written."""


class Layer(NamedTuple):
    """Options of a file or of the command line, before their types are checked."""

    source: str
    """The file, or COMMAND_LINE; for errors."""
    options: DictConfig


def read_layers(files: Sequence[Path], overrides: Sequence[str]) -> list[Layer]:
    """Read the sources of a config; later ones win.

    Raises:
        UserError: See read and dotlist.
    """
    layers = [Layer(str(file), read(file)) for file in files]
    return [*layers, Layer(COMMAND_LINE, dotlist(overrides))]


def load(
    schema: type[C], layers: Sequence[Layer], parts: PartConfigs, *, is_saved: bool = False
) -> C:
    """Merge layers into the defaults of `schema`; return a frozen config.

    Args:
        schema: The root config class.
        layers: The options; later ones win.
        parts: The third-party parts.
        is_saved: Another version may have written the files: keys that `schema` does not have are
            ignored, and former values are read under their new names.

    Raises:
        UserError: A key is unknown, or a value has the wrong type or is out of range.
    """
    grown = config_tree.extended(schema, parts)
    node = copy.deepcopy(_defaults(grown))
    for layer in layers:
        options = copy.deepcopy(layer.options)  # merging changes it
        if is_saved and layer.source != COMMAND_LINE:
            convert_saved(options, grown)
        try:
            _check_containers("", unresolved(options), grown)
            node = OmegaConf.unsafe_merge(node, options)
        except OmegaConfBaseException as error:
            raise UserError(f"{layer.source}: {explain(error, grown)}") from error
        except UserError as error:
            raise UserError(f"{layer.source}: {error}") from error
    try:
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, grown)) from error
    config_tree.check_ranges(config)
    return config_tree.build(grown, config_tree.plain(config))


@lru_cache(maxsize=8)
def _defaults(schema: type) -> DictConfig:
    """Return the schema's OmegaConf node, for copies. Making it takes the longest."""
    return OmegaConf.structured(schema)


def _check_containers(key: str, value: object, annotation: object) -> None:
    """Check that lists, and keys with values, are where a config class has them.

    Args:
        key: The option; "": the root.
        value: Its value.
        annotation: Its type; None: unknown.

    Raises:
        UserError: An option has a list or keys in the place of one value, or the reverse.
    """
    is_interpolation = isinstance(value, str) and "${" in value
    if value is None or is_interpolation or annotation in (None, Any, object):
        return
    given = _known_container(type(value))
    taken = _container(annotation)
    if given is not taken:
        form = FORMS[taken].format(key)
        raise UserError(f"{key}={value} has the wrong form. The option takes {form}.")
    if isinstance(value, dict):
        hints = hints_of(annotation) if dataclasses.is_dataclass(annotation) else {}
        for name, child in cast(Tree, value).items():
            child_key = f"{key}.{name}" if key else name
            _check_containers(child_key, child, hints.get(name, element(annotation)))


def _container(annotation: Any) -> object:
    """Return list, dict, or object for one value: what an option of this type takes."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):  # with null
        return _container(next(kind for kind in get_args(annotation) if kind is not NoneType))
    if dataclasses.is_dataclass(annotation):
        return dict
    return list if origin is tuple else _known_container(origin or annotation)


def _known_container(kind: object) -> object:
    """Return a type of FORMS itself, and object for another type."""
    return kind if kind in FORMS else object


def convert_saved(layer: object, schema: object) -> None:
    """Remove keys from `layer` that the config class `schema` does not have; rename old values."""
    if not (isinstance(layer, DictConfig) and dataclasses.is_dataclass(schema)):
        return
    hints = hints_of(schema)
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


def read(file: Path) -> DictConfig:
    """Read a YAML file. An empty file is an empty config.

    Raises:
        UserError: The file is missing or unreadable, or is not a mapping.
    """
    return cast(DictConfig, _read(file, OmegaConf.load))


def read_saved(file: Path) -> Tree:
    """Read the file of `save` as plain values: it is complete, and has no interpolations.

    Ten times as fast as `read`.

    Raises:
        UserError: See read.
    """
    content = _read(file, lambda path: yaml.load(path.read_bytes(), SAVED_LOADER))
    return cast(Tree, content)


def _read(file: Path, read: Callable[[Path], object]) -> object:
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
    if not isinstance(content, Mapping):
        raise UserError(f"config file {file} must hold `key: value` pairs.")
    return cast(object, content)


def dotlist(overrides: Sequence[str]) -> DictConfig:
    """Parse dotted overrides.

    Raises:
        UserError: An override is not of the form `key=value`.
    """
    layer = OmegaConf.create()
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or item.startswith(("-", "=")):
            raise UserError(
                f"'{item}' is not an override. Write key=value, for example trainer.ppo.lr=1e-5."
            )
        as_text = f"""As a text in a shell: {key}='"{value}"'"""
        try:
            layer.merge_with_dotlist([item])
            tokens = [*_scan(value)]
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise UserError(
                f"{item}: the override cannot be parsed. {as_text}: {one_line(error)}"
            ) from error
        if value[tokens[-2].end_mark.index :].strip():
            raise UserError(f"{item}: a comment begins at #. {as_text}")
    return layer


def unresolved(options: DictConfig) -> Tree:
    """Return the options of a layer as plain values, its interpolations as texts."""
    return cast(Tree, OmegaConf.to_container(options, resolve=False))


def save(config: Any, *files: Path) -> None:
    """Write the whole resolved config as YAML, each file atomically."""
    content = _as_yaml(dataclasses.asdict(config))
    for file in files:
        with replacing(file) as temporary:
            temporary.write_text(content)


def _as_yaml(tree: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def changes(file: Path, config: Any) -> Iterator[str]:
    """Yield each option that has another value in a saved config, as `key=value (was value)`."""
    before = dict(values("", read_saved(file)))
    for key, value in values("", config_tree.plain(config)):
        if before.get(key, value) != value:
            yield f"{key}={value} (was {before[key]})"


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
