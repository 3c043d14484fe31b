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
    (temp / MANIFEST).unlink(missing_ok=True)
    files = {str(f.relative_to(temp)): f.stat().st_size for f in temp.rglob("*") if f.is_file()}
    (temp / MANIFEST).write_text(json.dumps({"files": files, **facts}, indent=2, sort_keys=True))
    for written in [*temp.rglob("*"), temp]:
        _sync(written)
    replaced = path.parent / f".{path.name}.old"
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
    os.rename(temp, path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def versions() -> dict[str, str]:
    """Return the package versions that a manifest records."""
    found = {name: version(name) for name in ("torch", "transformers")}
    return found | {"arealite": arealite.__version__}


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
            with suppress(FileNotFoundError):  # another rank was faster
                os.rename(old, path)
    steps = {path: found.get("step", 0) for path in root.glob("[!.]*") if (found := manifest(path))}
    return sorted(steps, key=lambda path: (steps[path], path.name))


def latest(root: Path) -> Path | None:
    """Return the newest whole checkpoint below `root`, or None."""
    return next(reversed(list_good(root)), None)


def prune(root: Path, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints, and leftovers of interrupted saves."""
    leftovers = [*root.glob(".*.tmp"), *root.glob(".*.old")]
    for path in [*list_good(root)[: -max(1, keep)], *leftovers]:
        shutil.rmtree(path, ignore_errors=True)
        log.info("checkpoint pruned", path=str(path))


def require(path: Path) -> dict[str, object]:
    """Return the manifest of the checkpoint at `path`.

    Raises:
        UserError: it is missing or broken; the message lists the good ones beside it.
    """
    if (found := manifest(path)) is None:
        good = ", ".join(p.name for p in list_good(path.parent)) or "none"
        state = "is broken (a file is missing or cut short)" if path.exists() else "does not exist"
        raise UserError(f"Checkpoint '{path}' {state}. Good ones in '{path.parent}': {good}.")
    return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
