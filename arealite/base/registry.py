"""Registries: each maps the names of one kind of part ("agent", "env", …) to classes.

Built-in entries are strings, so that listing the names imports nothing.
"""

import difflib
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import iscoroutinefunction, isfunction, unwrap
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Generic, Self, TypeVar, cast

from arealite.base.data import read_toml
from arealite.base.errors import UserError

ENTRY_POINT_GROUP = "arealite.plugins"
"""Entry point group of installed packages; importing its modules registers their parts."""
UNNAMED = "MODULE"
"""Stands in an error for a module whose name is not known."""
imported: list[str] = []
"""Values of the option `imports` that this process has imported."""


T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """The names and classes of one kind of part ("agent", "env", …).

    Args:
        kind: The kind, for errors.
        table: The built-in parts: "module:class" by name.
    """

    def __init__(self, kind: str, /, **table: str) -> None:
        self.kind = kind
        self.configs: dict[str, type] = {}
        """Config class of each third-party part, by name."""
        self._table: dict[str, str | type[T]] = {**table}
        self._built_in = {line: name for name, line in table.items()}

    @classmethod
    def built_in(cls, kind: str) -> Self:
        """Return the registry of a kind, with its parts in `parts.toml`."""
        return cls(kind, **read_toml(__file__, "parts.toml")[kind])

    def register(self, name: str, *, config: type | None = None) -> Callable[[C], C]:
        """Return a class decorator that registers a part under `name`.

        Args:
            name: The part's `type` in a config.
            config: The config class of its options; None: no options, or those of its base class.

        Raises:
            UserError: Another class has this name.
        """

        def add(cls: C) -> C:
            known = self._table.get(name)
            if known is not None and getattr(known, "__qualname__", known) != cls.__qualname__:
                what = f"{self.kind} '{name}' is already registered"
                raise UserError(f"{what}; choose another name for {cls.__name__}.")
            check_async(cls)
            self._table[name] = cast(type[T], cls)
            if config is not None:
                self.configs[name] = config
            return cls

        return add

    def check(self, name: str) -> None:
        """Check that a name is registered, without importing its class.

        Raises:
            UserError: The name is unknown. The message has a suggestion and all known names.
        """
        if name not in self._table:
            line = unknown(f"{self.kind} type", name, self.names())
            raise UserError(f"{line} If it is your own, add imports=[{module_named(name)}].")

    def get(self, name: str) -> type[T]:
        """Import and return the class with this name.

        Raises:
            UserError: The name is unknown.
        """
        self.check(name)
        target = self._table[name]
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            target = getattr(importlib.import_module(module), attribute)
            self._table[name] = target
        return target  # type: ignore[return-value]

    def name_of(self, cls: object) -> str | None:
        """Return the name under which a class is registered; None if it is not."""
        line = f"{getattr(cls, '__module__', '')}:{getattr(cls, '__qualname__', '')}"
        return next((name for name, known in self._table.items() if known in (cls, line)), None)

    def base_of(self, name: str) -> str:
        """Return the built-in part that part `name` is or extends; without one, `name`."""
        classes = getattr(self._table.get(name), "__mro__", ())
        lines = [f"{cls.__module__}:{cls.__qualname__}" for cls in classes]
        return next((self._built_in[line] for line in lines if line in self._built_in), name)

    def options(self, config: Any) -> Any:
        """Return the options of part `config.type`, or of the built-in part that it extends."""
        own = getattr(config, config.type, None)
        return own or getattr(config, self.base_of(config.type), None)

    def names(self) -> list[str]:
        """List the known names, sorted."""
        return sorted(self._table)


def check_async(cls: type) -> None:
    """Raise UserError if a method is no coroutine, but overrides one."""
    for name, own in vars(cls).items():
        above = any(iscoroutinefunction(getattr(base, name, None)) for base in cls.__bases__)
        if above and isfunction(own) and not iscoroutinefunction(unwrap(own)):
            where = f"{cls.__qualname__}.{name}"
            raise UserError(f"{where} must be a coroutine: write `async def {name}(…)`.")


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """Format the error for an unknown name, with the nearest known name as a suggestion."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"Unknown {what} '{name}'.{hint} Known: {', '.join(known)}."


def module_named(name: str) -> str:
    """Return the module of this name that registers the name; UNNAMED without one.

    The module is searched in `arealite.impl` and in the working directory.
    """
    impl = Path(__file__).resolve().parents[1] / "impl"
    own = Path(f"{name}.py")
    files = [*impl.rglob(own.name), own] if name.isidentifier() else []
    for file in filter(Path.is_file, files):
        if re.search(rf"register\(\s*[\"']{name}[\"']", file.read_text(errors="replace")):
            base = impl.parents[1] if file.is_absolute() else Path()
            return ".".join(file.relative_to(base).with_suffix("").parts)
    return UNNAMED


def import_plugins(modules: Sequence[str]) -> None:
    """Import the entry points of installed packages, and `modules`.

    Args:
        modules: Values of the option `imports`: modules or .py files. A file can import modules of
            its own folder.

    Raises:
        UserError: A module cannot be found, or its import fails.
    """
    for entry in _entry_points(tuple(sys.path), tuple(map(_changed_at, sys.path))):
        entry.load()
    for module in modules:
        import_user_module(module, f"imports=[{module}]")
        imported.append(module)


@lru_cache(maxsize=1)
def _entry_points(
    folders: Sequence[str], changed_at: Sequence[int]
) -> importlib.metadata.EntryPoints:
    """Return our entry points in `folders`. To search them takes a tenth of the time of a load."""
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def _changed_at(folder: str) -> int:
    """Return when an entry of a folder was added or removed, in ns; 0 for no folder."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def import_user_module(module: str, option: str) -> ModuleType:
    """Import a module, or a .py file, that an option names.

    Raises:
        UserError: The module cannot be found, its import fails, or its import has not ended (to
            import it here could wait for the importing thread forever).
    """
    file = Path(module).expanduser().resolve()
    is_file = module.endswith(".py")
    name, folder = file.stem if is_file else module, str(file.parent)
    if is_new := is_file and folder not in sys.path:
        sys.path.insert(0, folder)
    if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
        raise UserError(f"{option}: {name} is still being imported. Call AReaLite in a function.")
    try:
        found = importlib.import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        last = extract_tb(error.__traceback__)[-1]  # of a SyntaxError, the line is in its text
        where = "" if last.filename.startswith("<") else f" ({last.filename}:{last.lineno})"
        why = f"importing it raised {type(error).__name__}: {error}{where}"
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            why = "no module of that name. It must be importable from the working directory "
            why += "or PYTHONPATH, or be the path of a .py file."
        raise UserError(f"{option}: {why}") from error
    if is_file and Path(getattr(found, "__file__", None) or "").resolve() != file:
        if is_new:  # later processes of this one would import the file in the other's place
            sys.path.remove(folder)
        what = f"another module has the name {name}"
        raise UserError(f"{option}: {what}. Rename the file, or correct its path.")
    return found


def import_function(path: str, option: str) -> Any:
    """Import the function or class `module:name` or `file.py:name` that an option names.

    Raises:
        UserError: As `import_user_module`, or the module has no callable of that name.
    """
    module, _, name = path.rpartition(":")
    if not module:
        raise UserError(f"{option} names no function. Write module:name or file.py:name.")
    found = import_user_module(module, option)
    if not callable(target := getattr(found, name, None)):
        known = [each for each, value in vars(found).items() if isfunction(value)]
        raise UserError(f"{option}: {unknown('function', name, known)}")
    return target
