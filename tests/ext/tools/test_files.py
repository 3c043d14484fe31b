"""The tool `files`: each episode has its own files, and their paths never reach the disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from arealite.api.task import Task
from arealite.api.tool import ToolError
from arealite.base.errors import EpisodeError
from arealite.ext.tools.config import FilesToolConfig
from arealite.ext.tools.file_tool import FilesTool

SECRET = "the secret"


@pytest.fixture
async def jail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tool and an episode's state; the parent of the working directory holds a secret file."""
    (tmp_path / "here/notes").mkdir(parents=True)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "here/own").write_text(SECRET)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path / "here")
    before = below(tmp_path)
    tool = FilesTool(FilesToolConfig(max_files=3, max_kb=1))
    state: dict[str, Any] = {}
    await tool.setup()
    await tool.begin(
        Task(
            task_id="t",
            prompt="?",
            ground_truth="1",
            extra_info={"files": {"notes/a.txt": "alpha"}},
        ),
        state,
    )
    yield tool, state
    await tool.end(state)
    await tool.close()
    assert below(tmp_path) == before
    assert (tmp_path / "secret").read_text() == (tmp_path / "here/own").read_text() == SECRET


def below(folder: Path) -> list[Path]:
    """Return all files and folders below a folder."""
    return sorted(folder.rglob("*"))


async def do(jail, action: str, path: str = "", content: str = "") -> str:
    tool, state = jail
    return await tool.call({"action": action, "path": path, "content": content}, state)


async def test_file_is_written_read_listed_and_deleted(jail) -> None:
    assert await do(jail, "list") == "notes/a.txt (5 bytes)"
    assert await do(jail, "read", "notes/a.txt") == "alpha"
    assert await do(jail, "write", "b/c.txt", "béta") == "wrote 5 bytes to b/c.txt"
    assert await do(jail, "write", "b/c.txt", "é") == "wrote 2 bytes to b/c.txt"
    assert await do(jail, "read", "b/c.txt") == "é"
    assert await do(jail, "list") == "b/c.txt (2 bytes)\nnotes/a.txt (5 bytes)"
    await do(jail, "delete", "b/c.txt")
    await do(jail, "delete", "notes/a.txt")
    assert await do(jail, "list") == "(no files)"


OUTSIDE = [
    "/etc/passwd",
    "../secret",
    "notes/../../secret",
    "..",
    ".",
    "",
    "a//b",
    "/",
    "a/",
    "./a",
    "a\0b",
    "a/" * 9 + "b",
]


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("action", ["read", "write", "delete"])
async def test_paths_that_lead_outside_are_refused(jail, action: str, path: str) -> None:
    with pytest.raises(ToolError, match="must be relative"):
        await do(jail, action, path, "x")


@pytest.mark.parametrize("action", ["read", "delete"])
async def test_files_of_the_disk_are_not_visible(jail, action: str) -> None:
    with pytest.raises(ToolError, match="No such file"):
        await do(jail, action, "own")


@pytest.mark.parametrize(
    ("action", "path", "said"),
    [
        ("read", "none", "No such file"),
        ("read", "notes", "Is a directory"),
        ("write", "notes", "Is a directory"),
        ("delete", "notes", "Is a directory"),
        ("delete", "none/none", "No such file"),
        ("read", "notes/a.txt/b", "Not a directory"),
        ("write", "notes/a.txt/b", "Not a directory"),
        ("write", "x" * 300, "name too long"),
    ],
)
async def test_invalid_path_is_a_tool_error(jail, action: str, path: str, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        await do(jail, action, path)


async def test_number_and_size_of_files_are_limited(jail) -> None:
    with pytest.raises(ToolError, match="at most 1 kB"):
        await do(jail, "write", "big", "x" * 1025)
    for name in "bc":
        await do(jail, "write", name, "x" * 1024)
    with pytest.raises(ToolError, match="already 3 files"):
        await do(jail, "write", "d", "x")
    await do(jail, "write", "c", "again")


async def test_calls_of_one_turn_run_in_order(jail) -> None:
    for number in range(20):
        write, read = do(jail, "write", "a", str(number)), do(jail, "read", "a")
        assert (await asyncio.gather(write, read))[1] == str(number)


async def test_episodes_share_nothing(jail) -> None:
    tool, other = jail[0], dict[str, Any]()
    await tool.begin(Task(task_id="t", prompt="?", ground_truth="1", extra_info={}), other)
    assert await tool.call({"action": "list"}, other) == "(no files)"
    await tool.end(other)


@pytest.mark.parametrize("files", [["a"], {"../a": "x"}, {"a": 1}])
async def test_task_with_invalid_files_fails_its_episode(jail, files: Any) -> None:
    state: dict[str, Any] = {}
    with pytest.raises(EpisodeError, match=r"t-9: extra_info\.files"):
        await jail[0].begin(
            Task(task_id="t-9", prompt="?", ground_truth="1", extra_info={"files": files}), state
        )
    await jail[0].end(state)
