"""Checkpoint folders that are whole or not there at all.

Here apart from what is in them: a folder is written under a temporary name, synced, described by a
manifest and renamed, so that a kill at any moment leaves the older ones good, and a broken one is
recognised and refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arealite.base.errors import UserError
from arealite.base.log import get

log = get(__name__)
MANIFEST = "manifest.json"


def temporary(path: Path) -> Path:
    """Return where the checkpoint `path` is written before it is renamed: `.<name>.tmp` beside."""
    return path.parent / f".{path.name}.tmp"


def begin(path: Path) -> Path:
    """Make an empty temporary folder for the checkpoint `path` and return it."""
    temp = temporary(path)
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    return temp


def commit(path: Path, facts: dict[str, Any]) -> None:
    """Describe, sync and rename the temporary folder of `path`; `facts` go into the manifest.

    A checkpoint already at `path` is replaced; if the process dies in between, `list_good` brings
    the old one back.
    """
    temp = temporary(path)
    files = {str(f.relative_to(temp)): f.stat().st_size for f in _files(temp)}
    (temp / MANIFEST).write_text(json.dumps({"files": files, **facts}, indent=2, sort_keys=True))
    for file in _files(temp):
        _sync(file)
    for folder in [temp, *(d for d in temp.rglob("*") if d.is_dir())]:
        _sync(folder)
    replaced = path.parent / f".{path.name}.old"
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
    os.rename(temp, path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def atomic_folder(path: Path, **facts: Any) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends without an error."""
    yield begin(path)
    commit(path, facts)


def manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a whole checkpoint; None if a file is missing or has another size."""
    try:
        found = json.loads((path / MANIFEST).read_text())
        sizes = found["files"].items()
        whole = all((path / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError, KeyError):
        return None
    return found if whole else None


def list_good(root: Path) -> list[Path]:
    """List the whole checkpoints below `root`, oldest step first."""
    for old in root.glob(".*.old"):
        path = root / old.name[1 : -len(".old")]
        if not path.exists() and manifest(old):
            os.rename(old, path)
    found = []
    for path in root.iterdir() if root.is_dir() else []:
        if path.is_dir() and not path.name.startswith(".") and (facts := manifest(path)):
            found.append((facts.get("step") or 0, path.name, path))
    return [path for _, _, path in sorted(found)]


def latest(root: Path) -> Path | None:
    """Return the newest whole checkpoint below `root`, or None."""
    good = list_good(root)
    return good[-1] if good else None


def prune(root: Path, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints, and what interrupted saves left
    behind."""
    leftovers = [*root.glob(".*.tmp"), *root.glob(".*.old")]
    for path in [*list_good(root)[: -max(1, keep)], *leftovers]:
        shutil.rmtree(path, ignore_errors=True)
        log.info("checkpoint pruned", path=str(path))


def require(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`.

    Raises:
        UserError: it is missing or broken; the message lists the good ones beside it.
    """
    found = manifest(path)
    if found is None:
        good = ", ".join(p.name for p in list_good(path.parent)) or "none"
        state = "is broken (a file is missing or cut short)" if path.exists() else "does not exist"
        raise UserError(f"Checkpoint '{path}' {state}. Good ones in '{path.parent}': {good}.")
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
