"""Files in a folder of the episode's own, and nowhere else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from arealite.api.task import Task
from arealite.api.tool import FilesToolConfig, ToolError
from arealite.base.errors import EpisodeError
from arealite.impl.tool.files import PREFIX, FilesTool

SECRET = "the secret"


@pytest.fixture
async def jail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tool, the state of an episode, and a secret beside its folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "jails"))
    (tmp_path / "jails").mkdir()
    tool = FilesTool(FilesToolConfig(max_files=3, max_kb=1))
    state: dict[str, Any] = {}
    await tool.setup()
    await tool.begin(Task("t", "?", "1", {"files": {"notes/a.txt": "alpha"}}), state)
    base = state["root"].parent
    (base / "secret").write_text(SECRET)
    yield tool, state
    await tool.end(state)
    assert [path.name for path in base.iterdir()] == ["secret"]
    assert (base / "secret").read_text() == SECRET
    await tool.close()
    assert not [*(tmp_path / "jails").iterdir()]


async def do(jail, action: str, path: str = "", content: str = "") -> str:
    tool, state = jail
    return await tool.call({"action": action, "path": path, "content": content}, state)


async def test_a_file_is_written_read_listed_and_deleted(jail) -> None:
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


@pytest.mark.parametrize("action", ["read", "write"])
async def test_links_are_not_followed(jail, action: str) -> None:
    root: Path = jail[1]["root"]
    (root / "out").symlink_to(root.parent)
    (root / "file").symlink_to(root.parent / "secret")
    for path in ("file", "out/secret"):
        with pytest.raises(ToolError):
            await do(jail, action, path, "overwritten")


async def test_deleting_a_link_leaves_what_it_names(jail) -> None:
    root: Path = jail[1]["root"]
    (root / "file").symlink_to(root.parent / "secret")
    await do(jail, "delete", "file")
    assert not (root / "file").is_symlink()


@pytest.mark.parametrize(
    ("action", "path", "said"),
    [
        ("read", "none", "No such file"),
        ("read", "notes", "Is a directory"),
        ("write", "notes", "Is a directory"),
        ("delete", "notes", "Is a directory"),
        ("delete", "none/none", "No such file"),
        ("read", "notes/a.txt/b", "Not a directory"),
        ("write", "x" * 300, "name too long"),
    ],
)
async def test_what_is_not_there_is_told(jail, action: str, path: str, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        await do(jail, action, path)


async def test_a_pipe_in_the_folder_hangs_nobody(jail) -> None:
    import os

    os.mkfifo(jail[1]["root"] / "pipe")
    async with asyncio.timeout(60):
        assert await do(jail, "read", "pipe") == ""


async def test_number_and_size_of_files_are_limited(jail) -> None:
    with pytest.raises(ToolError, match="at most 1 kB"):
        await do(jail, "write", "big", "x" * 1025)
    for name in "bc":
        await do(jail, "write", name, "x" * 1024)
    with pytest.raises(ToolError, match="already 3 files"):
        await do(jail, "write", "d", "x")
    await do(jail, "write", "c", "again")


async def test_calls_of_one_turn_are_made_in_their_order(jail) -> None:
    for number in range(20):
        write, read = do(jail, "write", "a", str(number)), do(jail, "read", "a")
        assert (await asyncio.gather(write, read))[1] == str(number)


async def test_episodes_share_nothing(jail) -> None:
    tool, other = jail[0], dict[str, Any]()
    await tool.begin(Task("t", "?", "1", {}), other)
    assert await tool.call({"action": "list"}, other) == "(no files)"
    await tool.end(other)


@pytest.mark.parametrize("files", [["a"], {"../a": "x"}, {"a": 1}])
async def test_a_task_with_bad_files_fails_its_episode(jail, files: Any) -> None:
    state: dict[str, Any] = {}
    with pytest.raises(EpisodeError, match=r"t-9: extra_info\.files"):
        await jail[0].begin(Task("t-9", "?", "1", {"files": files}), state)
    await jail[0].end(state)


async def test_what_a_killed_worker_left_is_removed_by_the_next(jail, tmp_path: Path) -> None:
    left = tmp_path / "jails" / f"{PREFIX}left"
    (left / "episode").mkdir(parents=True)
    other = FilesTool(FilesToolConfig())
    await other.setup()
    assert not left.exists()
    assert jail[1]["root"].exists(), "that of a live one stays"
    await other.close()
