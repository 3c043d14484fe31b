"""Pass Python objects to the processes of a run: code by import path, rows as a file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from arealite.base.errors import UserError
from arealite.base.registry import Registry
from arealite.system.data.row_files import write_rows

TO_ROWS = ("to_list", "to_dicts", "to_pylist")
"""Methods that return rows: of datasets.Dataset, polars.DataFrame, pyarrow.Table."""


def word(key: str, value: object) -> str:
    """Return an option of the command line. The value is JSON, which is also YAML."""
    return f"{key}={msgspec.json.encode(value, enc_hook=_plain).decode()}"


def import_path(value: object, option: str) -> str:
    """Return the path by which another process imports a function or class.

    Returns:
        `module:name`; for an object of the main script, `/folder/script.py:name`.

    Raises:
        UserError: No other process can import the object.
    """
    name: str = getattr(value, "__qualname__", None) or type(value).__name__
    module = getattr(value, "__module__", None) or ""
    home = _home(module)
    if "<lambda>" in name:
        why = "is a lambda"
    elif "<locals>" in name:
        why = "is defined inside a function"
    elif not home:
        why = "is defined in a notebook or a console"
    elif getattr(sys.modules.get(module), name, None) is not value:
        why = f"is not the object {name} of module {home}"
    else:
        return f"{home}:{name}"
    short = name.rpartition(".")[2].strip("<>")
    raise UserError(
        f"{option}={short} {why}, so the processes of the run cannot import it. Write it as a "
        f"function or class of a file, for example my_{option}.py (in a notebook, begin the cell "
        f"with %%writefile my_{option}.py), and pass {option}='my_{option}.py:NAME'."
    )


def _home(module: str) -> str:
    """Return the name or file by which other processes import a module; "" for a notebook."""
    if module != "__main__":
        return module
    main = sys.modules[module]
    if spec := getattr(main, "__spec__", None):  # python -m module
        return spec.name
    file = Path(getattr(main, "__file__", None) or "")
    return str(file.absolute()) if file.suffix == ".py" and file.is_file() else ""


def registered(value: str | type, registry: Registry[Any]) -> tuple[str, list[str]]:
    """Return a part's registered name, and the values of `imports` that register it.

    Raises:
        UserError: The class is not registered, or no other process can import it.
    """
    if isinstance(value, str):
        return value, []
    name, kind = registry.name_of(value), registry.kind
    if name is None:
        raise UserError(
            f"{kind}={getattr(value, '__name__', value)} is not registered. Write "
            f'@arealite.{kind}s.register("NAME") above the class, or pass a registered name.'
        )
    module = import_path(value, kind).partition(":")[0]
    return name, [] if module.startswith("arealite.") else [module]


def reward_words(reward: object, key: str) -> list[str]:
    """Return the options for a reward: a name, a function, a class, a list or weights by function.

    Raises:
        UserError: No other process can import a function.
    """
    if isinstance(reward, str) and ":" not in reward:
        return [word(f"{key}.type", reward)]
    parts: Iterable[Any] = reward if isinstance(reward, list | tuple | Mapping) else [reward]
    paths = [each if isinstance(each, str) else import_path(each, "reward") for each in parts]
    found = [word(f"{key}.type", "function"), word(f"{key}.function.paths", paths)]
    if isinstance(reward, Mapping):
        found.append(word(f"{key}.function.weights", [*reward.values()]))
    return found


def data_path(data: Any, folder: Path, key: str) -> str:
    """Return the value of a dataset option; write rows in memory to a file named by their content.

    Args:
        data: A path, `generated`, or rows: dicts, a Dataset, a DataFrame.
        folder: Folder of the file.
        key: The option, for errors.

    Raises:
        UserError: A row is not a dict of JSON values, or there are no rows.
    """
    if isinstance(data, str | Path):
        return str(data)
    method = next((name for name in TO_ROWS if hasattr(data, name)), None)
    if method is None and hasattr(data, "iterrows"):
        rows = data.to_dict("records")  # pandas
    else:
        rows = [*(getattr(data, method)() if method else data)]
    encoded = list[msgspec.Raw]()
    for number, row in enumerate(rows):
        try:
            if not isinstance(row, Mapping):
                raise TypeError(f"it is {type(row).__name__}")
            encoded.append(msgspec.Raw(msgspec.json.encode(row, enc_hook=_plain)))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            split = " Of a dict of splits, pass one." if isinstance(data, Mapping) else ""
            what = f"row {number} is no dict of JSON values: {error}"
            raise UserError(f"{key}: {what}. Pass a list of dicts, or a file.{split}") from error
    if not encoded:
        raise UserError(f"{key} has no rows. Pass at least one.")
    digest = hashlib.blake2b(b"\n".join(map(bytes, encoded)), digest_size=8).hexdigest()
    file = folder / f"data-{digest}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(file, encoded)  # pyright: ignore[reportArgumentType]
    return str(file)


def _plain(value: Any) -> object:
    """Convert a value that JSON does not have: a path, or a number or an array of numpy."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")
