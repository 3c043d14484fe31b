"""The door of the core: names, and the "module:attribute" that each stands for.

A *group* holds entries of one kind: the parts `agent`, `env`, `reward` …; their options
`options.agent` …; `command`; and hooks, which the core calls at fixed moments. The core knows an
entry by its name alone, and imports it when the name is used.

Entries of AReaLite stand in `base/entries.toml` and `ext/entries.toml`. Another package has entry
points of the same groups with the prefix `arealite.`, like `arealite.env`.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import msgspec

from arealite.base.errors import UserError, one_line
from arealite.base.files import cache_folder, read_toml, replacing

T = TypeVar("T")
PREFIX = "arealite."
"""Entry points of other packages have a group that begins so."""
EXT = Path(__file__).parents[1] / "ext" / "__init__.py"
SETTLED_NS = 2 * 10**9
"""Time without a change of a folder until its entries are kept: an installer may still write."""
Groups = dict[str, dict[str, str]]
"""Target ("module:attribute") by group and name."""


class Searched(TypedDict):
    """The entries of the packages in one folder."""

    changed_ns: int
    """When an entry of the folder was last added or removed."""
    groups: Groups


@cache
def own(group: str) -> Mapping[str, str]:
    """Return the entries of AReaLite itself: the target of each name."""
    core: Groups = read_toml(__file__, "entries.toml")
    extensions: Groups = read_toml(str(EXT), "entries.toml")
    return {**core.get(group, {}), **extensions.get(group, {})}


def installed(group: str) -> Mapping[str, str]:
    """Return the entries of other installed packages: the target of each name."""
    folders = tuple(map(_absolute, sys.path))
    changed_at = tuple(map(_changed_at, folders))
    return _installed(folders, changed_at).get(group, {})


def find(group: str, name: str) -> str | None:
    """Return the target of a name. Other packages are searched only for names not of AReaLite."""
    return own(group).get(name) or installed(group).get(name)


def load(target: str) -> Any:
    """Import a module and return its attribute; without an attribute, the module.

    Args:
        target: "module:attribute" or "module".

    Raises:
        UserError: Another package's entry cannot be imported.
    """
    if target.startswith(PREFIX):
        return _load(target)
    try:
        return _load(target)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"the entry point {target} of an installed package cannot be loaded: "
            f"{type(error).__name__}: {one_line(error)}. Install what it lacks, "
            "perhaps an extra of that package; or update that package, or remove it."
        ) from error


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def hooks(group: str) -> list[Any]:
    """Import and return all entries of a group, those of AReaLite first."""
    return [load(target) for target in [*own(group).values(), *installed(group).values()]]


def first_result(functions: Iterable[Callable[..., T | None]], *arguments: object) -> T | None:
    """Call functions until one returns something other than None; return that, or None."""
    for function in functions:
        result = function(*arguments)
        if result is not None:
            return result
    return None


def results(functions: Iterable[Callable[..., T | None]], *arguments: object) -> list[T]:
    """Call all functions; return their results without None."""
    all_results = [function(*arguments) for function in functions]
    return [result for result in all_results if result is not None]


@lru_cache(maxsize=1)
def _installed(folders: Sequence[str], changed_at: Sequence[int]) -> Groups:
    """Return the entries of the packages in `folders`; those of an earlier folder win.

    The entries of a folder are kept in a file until the folder changes: to search all packages
    takes 0.1 s, to read the file a millisecond.
    """
    file = cache_folder() / "entry_points.json"
    searched = _read_searched(file)
    new: dict[str, Searched] = {}
    groups: Groups = {}
    for folder, changed_ns in zip(folders, changed_at, strict=True):
        folder_entries = searched.get(folder)
        if folder_entries is None or folder_entries["changed_ns"] != changed_ns:
            num_packages, folder_groups = _search(folder)
            folder_entries = Searched(changed_ns=changed_ns, groups=folder_groups)
            if num_packages and time.time_ns() - changed_ns > SETTLED_NS:
                new[folder] = folder_entries
        for group, targets in folder_entries["groups"].items():
            groups[group] = {**targets, **groups.get(group, {})}
    if new:
        _save_searched(file, {**searched, **new})
    return groups


def _read_searched(file: Path) -> dict[str, Searched]:
    """Return the entries of each folder that was searched before."""
    with suppress(OSError, ValueError, msgspec.ValidationError):
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Searched])
    return {}


def _save_searched(file: Path, searched: Mapping[str, Searched]) -> None:
    """Save the entries of each folder, for later processes; a read-only home keeps nothing."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            temporary.write_bytes(msgspec.json.encode(searched))


def _search(folder: str) -> tuple[int, Groups]:
    """Return the number of packages in a folder, and their entries without those of AReaLite."""
    if _has_no_package(folder):
        return 0, {}
    from importlib.metadata import distributions  # costs 20 ms

    groups: Groups = {}
    packages = [*distributions(path=[folder])]
    for package in packages:
        try:
            entry_points = package.entry_points
        except (TypeError, ValueError):  # a damaged file of any package
            continue
        for entry_point in entry_points:
            is_ours = entry_point.value.startswith(PREFIX)
            if entry_point.group.startswith(PREFIX) and not is_ours:
                group = groups.setdefault(entry_point.group.removeprefix(PREFIX), {})
                group[entry_point.name] = entry_point.value
    return len(packages), groups


def _has_no_package(folder: str) -> bool:
    """Return whether `folder` is a folder without metadata of a package; an archive may have it."""
    try:
        names = os.listdir(folder)
    except NotADirectoryError:
        return False
    except OSError:
        return True
    return not any(name.endswith((".dist-info", ".egg-info", ".egg")) for name in names)


def _absolute(folder: str) -> str:
    """Return the absolute path of a folder of `sys.path`; "" is the working directory."""
    try:
        return os.path.abspath(folder)
    except OSError:  # the working directory was removed
        return folder


def _changed_at(folder: str) -> int:
    """Return when an entry of a folder was added or removed, in ns; 0 for no folder."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0
