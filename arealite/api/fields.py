"""Config fields with a help text and a range, and base classes of options.

`--help` and docs/reference/config.md print the help text; `make check` requires one for each
field. Loading a config checks the ranges.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from arealite.base import entries

if TYPE_CHECKING:
    from arealite.api.experiment_config import ExperimentConfig, ServerConfig

C = TypeVar("C", bound=type)

Constraints = Iterator[tuple[bool, str]]
"""Result of a config's method `constraints`: pairs of (whether the constraint holds, its error).
The error begins with an option's name; base.config_tree.check_constraints prefixes the section."""


class Package(NamedTuple):
    """An optional package of a part.

    The options of an environment or a server may have a method `packages`, which yields those that
    they need.
    Hooks `packages` return those of other options.
    """

    module: str
    """The module to import."""
    requirement: str
    """The argument of `pip install` that installs it."""
    option: str = ""
    """The option that needs it, such as "mcp"; "": the part itself does."""


def opt(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """Declare a config field.

    Args:
        default: The default value.
        help: One line of documentation.
        at_least: Inclusive lower bound. Any bound also requires a finite number; None is valid.
        above: Exclusive lower bound; `-inf` only requires a finite number.
        at_most: Inclusive upper bound.
        below: Exclusive upper bound.
        renamed: Former values of a choice and their new names, for the error message.
    """
    bounds = {
        "at least": at_least,
        "above": above,
        "at most": at_most,
        "below": below,
    }
    metadata = {
        "help": help,
        "bounds": {word: limit for word, limit in bounds.items() if limit is not None},
        "renamed": renamed or {},
    }
    return field(default=default, metadata=metadata)


def part(factory: Callable[[], Any]) -> Any:
    """Return a field with the options of the type whose name is the field's."""
    return sub(factory, "options of this type")


def with_options_of(kind: str) -> Callable[[C], C]:
    """Return a decorator that adds a field to a config class for each part of a kind.

    The parts are AReaLite's own (group `options.KIND` in base/entries.py). Options of other
    packages' parts are added when a config is loaded.
    """

    def add(cls: C) -> C:
        for name, target in entries.own(f"options.{kind}").items():
            options_class = entries.load(target)
            cls.__annotations__[name] = options_class
            setattr(cls, name, part(options_class))
        return cls

    return add


def sub(factory: Callable[[], Any], help: str) -> Any:
    """Declare a nested config, list or dict with the default `factory()` and a line of help."""
    return field(default_factory=factory, metadata={"help": help})


def named(kind: str, default: str | Callable[[], list[str]], help: str) -> Any:
    """Declare a field whose value is the registered name of a part, or a list of such names.

    Its config class gets the options of other packages' parts of this kind.

    Args:
        kind: The kind of part: "agent", "env", …
        default: The default name, or a function that returns the default list.
        help: One line of documentation.
    """
    metadata = {"help": help, "names": kind}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


# ------------------------------------------------------------ base classes of options

# The answers that the core needs besides the values of fields. The config class of a part derives
# from the class of its kind here, if the answer of that class is not its own. The core reads them
# without an import of the part.


class EnvOptions:
    """Options of an environment."""

    reads_columns: ClassVar[bool] = False
    """Whether the environment reads `Task.columns`."""


class RewardOptions:
    """Options of a reward function."""

    def unused_constraints(self, chosen: str) -> Constraints:
        """Yield the constraints of these options if `chosen`, another type, is the reward's.

        Each error begins with an option of the section `reward`.
        """
        yield from ()


class ServerOptions:
    """Options of an LLM server."""

    def supervise(self, config: "ServerConfig", command: Sequence[str], starter: Any) -> int | None:
        """Run a server in a child process; start it again when it dies or hangs.

        Args:
            config: The server's config.
            command: The command line of the child process.
            starter: Starts the child process (`RoleStarter`).

        Returns:
            The exit code; None: the server restarts its own processes, so it runs here.
        """
        return None


class PublisherOptions:
    """Options of a weight publisher."""

    needs_servers: ClassVar[bool] = True
    """Whether the run needs LLM servers."""

    def check_host(self, host: str) -> None:
        """Check that the publisher can use this host, at which trainer rank 0 will run.

        Raises:
            UserError: It cannot: a port is in use, say.
        """

    def run_constraints(self, config: "ExperimentConfig") -> Constraints:
        """Yield the constraints between this publisher and other options of a run.

        Each error begins with an option's whole name.
        """
        yield from ()
