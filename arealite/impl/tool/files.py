"""Text files of an episode, kept in memory. The agent's paths are never used on the disk."""

from itertools import accumulate
from typing import Any

from arealite.api.task import Task
from arealite.api.tool import Tool, ToolError, function
from arealite.base.errors import EpisodeError

MAX_DEPTH = 8
MAX_NAME = 255


class FilesTool(Tool):
    """Lists, reads, writes and deletes an episode's text files.

    An episode starts with the files of the task's `extra_info.files`.
    """

    deterministic = True
    schema = function(
        "files",
        "Keep text files in a folder of your own.",
        required=("action",),
        action={"type": "string", "enum": ["list", "read", "write", "delete"]},
        path={"type": "string", "description": "as in notes/a.txt; not for list"},
        content={"type": "string", "description": "for write"},
    )

    async def begin(self, task: Task, state: dict[str, object]) -> None:
        """Create the files of the task.

        Raises:
            EpisodeError: `extra_info.files` does not map paths to texts.
        """
        state["files"] = {}
        try:
            for path, content in task.extra_info.get("files", {}).items():
                self._write(state["files"], str(path), content)
        except (AttributeError, ToolError) as error:
            rule = "extra_info.files must map paths to texts"
            raise EpisodeError(f"task {task.task_id}: {rule}: {error}") from error

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Perform one action on the episode's files; return its result."""
        files: dict[str, bytes] = state["files"]
        action = arguments["action"]
        path = arguments.get("path", "")
        if action == "list":
            lines = [f"{name} ({len(data)} bytes)" for name, data in sorted(files.items())]
            return "\n".join(lines) or "(no files)"
        if action == "write":
            return self._write(files, path, arguments.get("content", ""))
        check_path(files, path)
        if path not in files:
            raise ToolError(f"{path}: No such file or directory")
        if action == "read":
            return files[path].decode()
        del files[path]
        return f"deleted {path}"

    def _write(self, files: dict[str, bytes], path: str, content: str) -> str:
        data = content.encode(errors="replace")
        if len(data) > self.config.max_kb << 10:
            raise ToolError(f"a file may have at most {self.config.max_kb} kB")
        if len(files) >= self.config.max_files and path not in files:
            raise ToolError(f"there are already {self.config.max_files} files; delete one")
        check_path(files, path)
        files[path] = data
        return f"wrote {len(data)} bytes to {path}"


def check_path(files: dict[str, bytes], path: str) -> None:
    """Check that a file system with `files` would accept `path` as a file.

    Raises:
        ToolError: `path` is absolute, contains "..", is too long, names a folder, or has a file as
            a parent.
    """
    parts = path.split("/")
    if "\0" in path or {"", ".", ".."} & {*parts} or len(parts) > MAX_DEPTH + 1:
        raise ToolError("a path must be relative, as in notes/a.txt, and without ..")
    if any(len(part.encode(errors="replace")) > MAX_NAME for part in parts):
        raise ToolError(f"{path}: File name too long")
    if any(name.startswith(f"{path}/") for name in files):
        raise ToolError(f"{path}: Is a directory")
    if any(parent in files for parent in accumulate(parts[:-1], "{}/{}".format)):
        raise ToolError(f"{path}: Not a directory")
