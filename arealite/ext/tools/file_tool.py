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
            raise EpisodeError(
                f"task {task.task_id}: extra_info.files must map paths to texts: {error}"
            ) from error

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Perform one action on the episode's files; return its result."""
        files: dict[str, bytes] = state["files"]
        action = arguments["action"]
        path = arguments.get("path", "")
        if action == "list":
            return file_list(files)
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
        content_bytes = content.encode(errors="replace")
        if len(content_bytes) > self.config.max_kb << 10:
            raise ToolError(f"a file may have at most {self.config.max_kb} kB")
        if len(files) >= self.config.max_files and path not in files:
            raise ToolError(f"there are already {self.config.max_files} files; delete one")
        check_path(files, path)
        files[path] = content_bytes
        return f"wrote {len(content_bytes)} bytes to {path}"


def file_list(files: dict[str, bytes]) -> str:
    """Return the paths of the files and their sizes, one file per line."""
    if not files:
        return "(no files)"
    return "\n".join(f"{path} ({len(files[path])} bytes)" for path in sorted(files))


def check_path(files: dict[str, bytes], path: str) -> None:
    """Check that a file system with `files` would accept `path` as a file.

    Raises:
        ToolError: `path` is absolute, contains "..", is too long, names a folder, or has a file as
            a parent.
    """
    names = path.split("/")
    has_special_name = not {"", ".", ".."}.isdisjoint(names)
    is_too_deep = len(names) > MAX_DEPTH + 1
    if "\0" in path or has_special_name or is_too_deep:
        raise ToolError("a path must be relative, as in notes/a.txt, and without ..")
    longest_name_bytes = max(len(name.encode(errors="replace")) for name in names)
    if longest_name_bytes > MAX_NAME:
        raise ToolError(f"{path}: File name too long")
    if any(file.startswith(f"{path}/") for file in files):
        raise ToolError(f"{path}: Is a directory")
    parents = accumulate(names[:-1], "{}/{}".format)
    if any(parent in files for parent in parents):
        raise ToolError(f"{path}: Not a directory")
