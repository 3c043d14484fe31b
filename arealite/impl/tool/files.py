"""A folder for each episode, in which the agent keeps files, and out of which no path leads."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from arealite.api.task import Task
from arealite.api.tool import Tool, ToolError, function
from arealite.base.errors import EpisodeError

PREFIX = "arealite-files-"
MAX_DEPTH = 8
TOLD = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EEXIST}
"""What the agent may have done wrong; a full disk is no fault of its."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK


class FilesTool(Tool):
    """Lists, reads, writes and deletes text files; `extra_info.files` of a task are there first."""

    deterministic = True
    schema = function(
        "files",
        "Keep text files in a folder of your own.",
        required=("action",),
        action={"type": "string", "enum": ["list", "read", "write", "delete"]},
        path={"type": "string", "description": "as in notes/a.txt; not for list"},
        content={"type": "string", "description": "for write"},
    )

    async def setup(self) -> None:
        """Make the folder of this worker, in which those of episodes are."""
        self.base, self.lock = await asyncio.to_thread(claim)

    async def begin(self, task: Task, state: dict[str, Any]) -> None:
        """Make the folder, and the task's own files in it."""
        state["turn"] = asyncio.Lock()  # calls of one turn are made in their order
        state["root"] = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self.base))
        files = task.extra_info.get("files", {})
        try:
            for name, content in files.items():
                await asyncio.to_thread(self._write, state["root"], str(name), content)
        except (AttributeError, ToolError) as error:
            what = f"{task.task_id}: extra_info.files must be texts by their paths: {error}"
            raise EpisodeError(what) from error

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Do one thing in the episode's folder."""
        action, path = arguments["action"], arguments.get("path", "")
        act = getattr(self, f"_{action}")
        given = (path, arguments.get("content", "")) if action == "write" else (path,)
        async with state["turn"]:
            try:
                return await asyncio.to_thread(act, state["root"], *given)
            except OSError as error:
                if error.errno not in TOLD:
                    raise
                raise ToolError(f"{path}: {error.strerror}") from None

    async def end(self, state: dict[str, Any]) -> None:
        """Remove the folder."""
        if "root" in state:
            await asyncio.to_thread(shutil.rmtree, state["root"], ignore_errors=True)

    async def close(self) -> None:
        """Remove the folder of this worker."""
        if hasattr(self, "lock"):
            await asyncio.to_thread(shutil.rmtree, self.base, ignore_errors=True)
            os.close(self.lock)

    def _list(self, root: Path, path: str = "") -> str:
        found = [f"{each.relative_to(root)} ({each.lstat().st_size} bytes)" for each in files(root)]
        return "\n".join(found) or "(no files)"

    def _read(self, root: Path, path: str) -> str:
        with opened(root, path, READ) as file, os.fdopen(file, "rb", closefd=False) as stream:
            return stream.read(self.config.max_kb << 10).decode(errors="replace")

    def _write(self, root: Path, path: str, content: str) -> str:
        data = content.encode(errors="replace")
        if len(data) > self.config.max_kb << 10:
            raise ToolError(f"a file may have at most {self.config.max_kb} kB")
        if len(files(root)) >= self.config.max_files and root / path not in files(root):
            raise ToolError(f"there are already {self.config.max_files} files; delete one")
        with opened(root, path, WRITE) as file:
            os.write(file, data)
        return f"wrote {len(data)} bytes to {path}"

    def _delete(self, root: Path, path: str) -> str:
        with parent(root, path) as (folder, name):
            os.unlink(name, dir_fd=folder)
        return f"deleted {path}"


def claim() -> tuple[Path, int]:
    """Make a folder, held by a lock of the kernel's, and remove those of processes that were
    killed; return it and the lock."""
    base = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(base, FOLDER)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for other in base.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # its process lives, or another one removes it now
            held = os.open(other, FOLDER)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other)
            finally:
                os.close(held)
    if base.exists():
        return base, lock
    os.close(lock)  # another process saw it before it was locked
    return claim()


def files(root: Path) -> list[Path]:
    """Return all files below a folder, sorted."""
    return sorted(Path(folder) / name for folder, _, names in os.walk(root) for name in names)


@contextmanager
def parent(root: Path, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder of `path` step by step, so that no link is followed; yield it and the name.

    Raises:
        ToolError: the path is not one below `root`.
    """
    *folders, name = path.split("/")
    if not name or "\0" in path or {"", ".", ".."} & {*folders, name} or len(folders) > MAX_DEPTH:
        raise ToolError("a path must be relative, as in notes/a.txt, and without ..")
    held = os.open(root, FOLDER)
    try:
        for each in folders:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(each, dir_fd=held)
            inner = os.open(each, FOLDER, dir_fd=held)
            os.close(held)
            held = inner
        yield held, name
    finally:
        os.close(held)


@contextmanager
def opened(root: Path, path: str, flags: int) -> Iterator[int]:
    """Open a file below `root`; one that is written is made, with its folders."""
    with parent(root, path, make=bool(flags & os.O_CREAT)) as (folder, name):
        file = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)
