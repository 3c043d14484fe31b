"""Checkpoint folders that are complete or absent.

A folder is written under a temporary name, described by a manifest, synced and renamed. A kill at
any moment therefore leaves older checkpoints valid, and an incomplete checkpoint is ignored.
"""

import json
import os
import shutil
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import arealite
from arealite.base.errors import UserError
from arealite.base.log import get

log = get(__name__)
MANIFEST = "manifest.json"


def temporary(path: Path) -> Path:
    """Return the folder in which the checkpoint `path` is written before it is renamed."""
    return path.parent / f".{path.name}.tmp"


def begin(path: Path) -> Path:
    """Make an empty temporary folder for the checkpoint `path` and return it."""
    temp = temporary(path)
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    return temp


def commit(path: Path, facts: dict[str, object]) -> None:
    """Write the manifest, with `facts`, into the temporary folder of `path`; sync and rename it.

    A checkpoint already at `path` is replaced; `list_good` restores it after a crash in between.
    """
    temp = temporary(path)
    manifest_file = temp / MANIFEST
    manifest_file.unlink(missing_ok=True)
    contents = {"files": _file_sizes(temp), **facts}
    manifest_file.write_text(json.dumps(contents, indent=2, sort_keys=True))
    for written in [*temp.rglob("*"), temp]:
        _sync(written)
    replaced = path.parent / f".{path.name}.old"
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
    os.rename(temp, path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in a folder by its relative path."""
    sizes = dict[str, int]()
    for path in folder.rglob("*"):
        if path.is_file():
            relative_path = str(path.relative_to(folder))
            sizes[relative_path] = path.stat().st_size
    return sizes


def versions() -> dict[str, str]:
    """Return the package versions that a manifest records."""
    return {
        "torch": version("torch"),
        "transformers": version("transformers"),
        "arealite": arealite.__version__,
    }


def manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a whole checkpoint; None if a file is missing or has another size."""
    try:
        contents = json.loads((path / MANIFEST).read_text())
        for name, num_bytes in contents["files"].items():
            if (path / name).stat().st_size != num_bytes:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return contents


def list_good(root: Path) -> list[Path]:
    """List the whole checkpoints below `root`, oldest step first."""
    for replaced in root.glob(".*.old"):
        name = replaced.name.removeprefix(".").removesuffix(".old")
        path = root / name
        if not path.exists() and manifest(replaced):
            with suppress(FileNotFoundError):  # another rank was faster
                os.rename(replaced, path)
    steps = dict[Path, int]()
    for path in root.glob("[!.]*"):
        contents = manifest(path)
        if contents:
            steps[path] = contents.get("step", 0)
    return sorted(steps, key=lambda path: (steps[path], path.name))


def latest(root: Path) -> Path | None:
    """Return the newest whole checkpoint below `root`, or None."""
    return next(reversed(list_good(root)), None)


def prune(root: Path, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints, and leftovers of interrupted saves."""
    outdated = list_good(root)[: -max(1, keep)]
    leftovers = [*root.glob(".*.tmp"), *root.glob(".*.old")]
    for path in [*outdated, *leftovers]:
        shutil.rmtree(path, ignore_errors=True)
        log.info("checkpoint pruned", path=str(path))


def require(path: Path) -> dict[str, object]:
    """Return the manifest of the checkpoint at `path`.

    Raises:
        UserError: it is missing or broken; the message lists the good ones beside it.
    """
    contents = manifest(path)
    if contents is not None:
        return contents
    state = "does not exist"
    if path.exists():
        state = "is broken (a file is missing or cut short)"
    good = ", ".join(good_path.name for good_path in list_good(path.parent)) or "none"
    raise UserError(f"Checkpoint '{path}' {state}. Good ones in '{path.parent}': {good}.")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
