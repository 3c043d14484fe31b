"""Pass Python objects to the processes of a run: code by import path, rows as a file."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from arealite.base.errors import UserError
from arealite.base.registry import Registry
from arealite.ext.datasets.plain_values import plain_row, rows_of
from arealite.ext.evaluation.row_files import write_rows


def encode(value: object) -> bytes:
    """Return a value as JSON, which is also YAML. Paths and values of numpy are converted."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> object:
    """Return the plain value of an array or a scalar of numpy, or of a path."""
    return value.tolist() if hasattr(value, "tolist") else str(Path(value))


def import_path(value: Any, option: str) -> str:
    """Return the path by which another process imports a function or class.

    Returns:
        `module:name`; for an object of the main script, `/folder/script.py:name`.

    Raises:
        UserError: No other process can import the object.
    """
    name = getattr(value, "__qualname__", "")
    module_name = getattr(value, "__module__", None) or ""
    module = sys.modules.get(module_name)
    if module_name == "__main__":
        module_name = _main_script()
    if module_name and getattr(module, name, None) is value:
        return f"{module_name}:{name}"
    pass_reward = ", or pass reward='my_reward.py:NAME'" if option == "reward" else ""
    raise UserError(
        f"{option}={name or repr(value)}: other processes cannot import "
        "a lambda, a function in a function, or code of a notebook cell. "
        "Write a function or class at the top level of a file "
        f"(in a notebook, begin a cell with %%writefile my_{option}.py), "
        f"and import it{pass_reward}."
    )


def _main_script() -> str:
    """Return the name by which another process imports the main script; "" if it cannot."""
    main = sys.modules.get("__main__")
    if main and main.__spec__:  # python -m module
        return main.__spec__.name
    file = Path(getattr(main, "__file__", None) or "")
    return str(file.absolute()) if file.suffix == ".py" and file.is_file() else ""


def registered(value: Any, registry: Registry[Any]) -> tuple[str, list[str]]:
    """Return a part's registered name, and the values of `imports` that register it.

    Raises:
        UserError: The part is not registered, or no other process can import its class.
    """
    if isinstance(value, str):
        registry.check(value)
        return value, []
    kind = registry.kind
    name = registry.name_of(value)
    if name is None:
        raise UserError(
            f"{kind}={getattr(value, '__name__', value)} is not registered. "
            f'Write @arealite.{kind}s.register("NAME") above the class, '
            "or pass a registered name."
        )
    module, _, _ = import_path(value, kind).partition(":")
    imports = [] if module.startswith("arealite.") else [module]
    return name, imports


def reward_options(reward: Any) -> dict[str, object]:
    """Return the options of a reward: a name, a function, a class, a list, or a dict of weights.

    Raises:
        UserError: No other process can import a function.
    """
    if isinstance(reward, str) and ":" not in reward:
        return {"type": reward}
    parts: Any = [reward]
    if isinstance(reward, list | tuple | Mapping):
        parts = cast(Any, reward)
    weights = [*parts.values()] if isinstance(reward, Mapping) else []
    paths = [part if isinstance(part, str) else import_path(part, "reward") for part in parts]
    return {"type": "function", "function": {"paths": paths, "weights": weights}}


def data_path(data: Any, folder: Path, option: str) -> str:
    """Return the value of a dataset option; write rows in memory to a file named by their content.

    Args:
        data: A path, `generated`, or rows: dicts, a Dataset, a DataFrame.
        folder: Folder of the file.
        option: The option, for errors.

    Raises:
        UserError: A row is not a dict of JSON values, or there are no rows.
    """
    if isinstance(data, str | Path):
        return str(data)
    encoded = list[Any]()
    try:
        for number, row in enumerate(rows_of(data, option)):
            plain = plain_row({**row}, f"{option}, row {number}")
            encoded.append(msgspec.Raw(encode(plain)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{option}: row {len(encoded)} is no dict of JSON values ({error}). "
            "Pass a list of dicts, a file, or one split, as in data['train']."
        ) from error
    if not encoded:
        raise UserError(f"{option} has no rows. Pass at least one.")
    digest = hashlib.blake2b(b"\n".join(map(bytes, encoded)), digest_size=8).hexdigest()
    file = folder / f"data-{digest}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(file, encoded)
    return str(file)
