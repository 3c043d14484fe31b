"""Registries: each maps the names of one kind of part ("agent", "env", …) to classes or functions.

A name is an entry of AReaLite, an entry point of an installed package (`base/entries.py`), or
registered by a module of the user.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Collection, Sequence
from inspect import iscoroutinefunction, isfunction, unwrap
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Generic, Self, TypeVar, cast

from arealite.base import entries
from arealite.base.errors import UserError

PLUGINS = "plugins"
"""Group of entry points of installed packages; importing their modules registers parts."""
UNNAMED = "MODULE"
"""Stands in an error for a module whose name is not known."""
imported: list[str] = []
"""Values of the option `imports` that this process has imported."""


T = TypeVar("T")
P = TypeVar("P")


class Registry(Generic[T]):
    """The names of one kind of part ("agent", "env", …), and the class or function of each.

    Args:
        kind: The kind, for errors.
        table: The built-in parts: "module:attribute" by name.
    """

    def __init__(self, kind: str, /, **table: str) -> None:
        self.kind = kind
        self.configs: dict[str, type] = {}
        """Config class of each third-party part, by name."""
        self._table: dict[str, str | T] = {**table}
        self._built_in = {line: name for name, line in table.items()}

    @classmethod
    def built_in(cls, kind: str) -> Self:
        """Return the registry of a kind, with the parts of AReaLite."""
        return cls(kind, **entries.own(kind))

    def register(self, name: str, *, config: type | None = None) -> Callable[[P], P]:
        """Return a decorator that registers a class or function under `name`.

        Args:
            name: The part's `type` in a config.
            config: The config class of its options; None: no options, or those of its base class.

        Raises:
            UserError: Another part has this name.
        """

        def add(part: P) -> P:
            registered = self._table.get(name)
            if registered is not None and _qualname(registered) != _qualname(part):
                raise UserError(
                    f"{self.kind} '{name}' is already registered; "
                    f"choose another name for {getattr(part, '__name__', part)}."
                )
            if isinstance(part, type):
                check_async(part)
            self._table[name] = cast(T, part)
            if config is not None:
                self.configs[name] = config
            return part

        return add

    def check(self, name: str) -> None:
        """Check that a name is registered, without importing its part.

        Raises:
            UserError: The name is unknown. The message has a suggestion and all known names.
        """
        self.enter([name])
        if name not in self._table:
            line = unknown(f"{self.kind} type", name, self.names())
            module = module_named(name)
            hint = f"If it is your own, add imports=[{module}]."
            if imported and module in (UNNAMED, *imported):
                hint = f"No module of imports=[{','.join(imported)}] registers it."
            raise UserError(f"{line} {hint}")

    def enter(self, names: Collection[str]) -> None:
        """Register the parts of installed packages that have one of these names.

        A part's options are the entry of the same name in the group `options.KIND`, unless its
        module registers the part itself.
        """
        unregistered = [name for name in names if name not in self._table]
        if not unregistered:
            return
        targets = entries.installed(self.kind)
        for name in unregistered:
            if name not in targets:
                continue
            part = entries.load(targets[name])
            options = entries.installed(f"options.{self.kind}").get(name)
            if name not in self._table:
                self.register(name, config=entries.load(options) if options else None)(part)

    def get(self, name: str) -> T:
        """Import and return the class or function with this name.

        Raises:
            UserError: The name is unknown.
        """
        self.check(name)
        target = self._table[name]
        if isinstance(target, str):
            part: T = entries.load(target)
            self._table[name] = part
            return part
        return target

    def name_of(self, cls: object) -> str | None:
        """Return the name under which a class is registered; None if it is not."""
        path = f"{getattr(cls, '__module__', '')}:{getattr(cls, '__qualname__', '')}"
        for name, target in self._table.items():
            if target in (cls, path):
                return name
        return None

    def base_of(self, name: str) -> str:
        """Return the built-in part that part `name` is or extends; without one, `name`."""
        classes = getattr(self._table.get(name), "__mro__", ())
        for cls in classes:
            path = f"{cls.__module__}:{cls.__qualname__}"
            if path in self._built_in:
                return self._built_in[path]
        return name

    def options(self, config: Any) -> Any:
        """Return the options of part `config.type`, or of the built-in part that it extends."""
        options = getattr(config, config.type, None)
        return options or getattr(config, self.base_of(config.type), None)

    def names(self) -> list[str]:
        """List the known names, sorted; also those of installed packages."""
        return sorted({*self._table, *entries.installed(self.kind)})


def _qualname(part: object) -> object:
    """Return the qualified name of a class or function; another object itself."""
    return getattr(part, "__qualname__", part)


def check_async(cls: type) -> None:
    """Raise UserError if a method is no coroutine, but overrides one."""
    for name, attribute in vars(cls).items():
        inherited = [getattr(base, name, None) for base in cls.__bases__]
        if not any(map(iscoroutinefunction, inherited)):
            continue
        if isfunction(attribute) and not iscoroutinefunction(unwrap(attribute)):
            raise UserError(
                f"{cls.__qualname__}.{name} must be a coroutine: write `async def {name}(…)`."
            )


def unknown(kind: str, name: str, names: Sequence[str]) -> str:
    """Format the error for a name that is not in `names`, with the nearest one as a suggestion."""
    similar = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean '{similar[0]}'?" if similar else ""
    return f"Unknown {kind} '{name}'.{hint} Known: {', '.join(names)}."


def module_named(name: str) -> str:
    """Return the name if the working directory has a module of that name, else UNNAMED."""
    has_module = name.isidentifier() and Path(f"{name}.py").is_file()
    return name if has_module else UNNAMED


def import_plugins(modules: Sequence[str]) -> None:
    """Import the entry points of installed packages, and `modules`.

    Args:
        modules: Values of the option `imports`: modules or .py files. A file can import modules of
            its own folder.

    Raises:
        UserError: A module cannot be found, or its import fails.
    """
    for target in entries.installed(PLUGINS).values():
        entries.load(target)
    for module in modules:
        import_user_module(module, f"imports=[{module}]")
        imported.append(module)


def import_user_module(module: str, option: str) -> ModuleType:
    """Import a module, or a .py file, that an option names.

    Raises:
        UserError: The module cannot be found, its import fails, or its import has not ended (to
            import it here could wait for the importing thread forever).
    """
    file = Path(module).expanduser().resolve()
    is_file = module.endswith(".py")
    if is_file and not file.is_file():
        raise UserError(f"{option}: no module of that name. {file} does not exist.")
    name = file.stem if is_file else module
    folder = str(file.parent)
    is_new_folder = is_file and folder not in sys.path
    if is_new_folder:
        sys.path.insert(0, folder)
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if getattr(spec, "_initializing", False):
        raise UserError(f"{option}: {name} is still being imported. Call AReaLite in a function.")
    try:
        imported_module = importlib.import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{option}: {_import_failure(error, name)}") from error
    imported_file = Path(getattr(imported_module, "__file__", None) or "").resolve()
    if is_file and imported_file != file:
        if is_new_folder:  # later processes of this one would import the file in the other's place
            sys.path.remove(folder)
        raise UserError(
            f"{option}: another module has the name {name}. Rename the file, or correct its path."
        )
    return imported_module


def _import_failure(error: BaseException, name: str) -> str:
    """Return why the import of the module `name` failed."""
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return (
            "no module of that name. It must be importable from the working directory "
            "or PYTHONPATH, or be the path of a .py file."
        )
    last_frame = extract_tb(error.__traceback__)[-1]  # the text of a SyntaxError has its line
    position = f" ({last_frame.filename}:{last_frame.lineno})"
    if last_frame.filename.startswith("<"):
        position = ""
    return f"importing it raised {type(error).__name__}: {error}{position}"
