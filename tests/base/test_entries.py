"""The door: entries of AReaLite and of other packages, their cache, and broken packages."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from arealite.base import entries
from arealite.base.files import read_toml
from arealite.cli import main as cli

OLD_NS = 10**18
"""A time of a change long ago."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for packages, the first of `sys.path`; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entries._installed.cache_clear()
    return on_path(tmp_path / "site", monkeypatch)


def on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


def install(folder: Path, name: str, groups: dict[str, dict[str, str]], *, at_ns: int) -> None:
    """Write a package's metadata as an installer does; the folder's time is `at_ns`."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = list[str]()
    for group, targets in groups.items():
        lines.append(f"[arealite.{group}]")
        lines += [f"{entry} = {target}" for entry, target in targets.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    os.utime(folder, ns=(at_ns, at_ns))


def new_process() -> None:
    """Forget what a new process does not know."""
    entries._installed.cache_clear()


def cache_file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "arealite" / "entry_points.json"


# ---------------------------------------------------------------- what an entry is


def test_own_entries_are_those_of_both_tables():
    core = read_toml(entries.__file__, "entries.toml")
    extensions = read_toml(str(entries.EXT), "entries.toml")
    both = {**core["agent"], **extensions["agent"]}
    assert entries.own("agent") == both and {"math_code_single_step", "chat"} <= both.keys()
    assert entries.own("no_such_group") == {}


def test_every_own_entry_can_be_loaded():
    for module in (entries.__file__, str(entries.EXT)):
        for group in read_toml(module, "entries.toml"):
            for name, target in entries.own(group).items():
                assert entries.load(target) is not None, (group, name)


def test_entry_of_another_package_is_found_and_loaded(site: Path):
    (site / "door_package.py").write_text("class Room: pass\n")
    install(site, "door", {"env": {"room": "door_package:Room"}}, at_ns=OLD_NS)
    assert entries.find("env", "room") == "door_package:Room"
    assert entries.load("door_package:Room").__name__ == "Room"
    assert entries.load("door_package") is sys.modules.pop("door_package")
    assert "room" not in entries.own("env")
    assert entries.find("agent", "room") is None


def test_own_name_wins_over_one_of_another_package(site: Path):
    install(site, "door", {"env": {"reverse": "door_package:Room"}}, at_ns=OLD_NS)
    assert entries.find("env", "reverse") == entries.own("env")["reverse"]


def test_entries_of_an_installed_arealite_are_not_those_of_another_package(site: Path):
    targets = {"reverse": "arealite.ext.games.reverse:ReverseEnv", "room": "arealite_room:Room"}
    install(site, "arealite", {"env": targets}, at_ns=OLD_NS)
    assert entries.installed("env") == {"room": "arealite_room:Room"}


def test_hooks_are_those_of_all_packages(site: Path, monkeypatch: pytest.MonkeyPatch):
    own = {"core": "pathlib:Path"}
    monkeypatch.setattr(entries, "own", lambda group: own if group == "moment" else {})
    install(site, "door", {"moment": {"theirs": "fractions:Fraction"}}, at_ns=OLD_NS)
    assert [hook.__name__ for hook in entries.hooks("moment")] == ["Path", "Fraction"]


def test_package_in_an_earlier_folder_wins(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(site, "door", {"env": {"room": "later:Room", "hall": "later:Hall"}}, at_ns=OLD_NS)
    earlier = on_path(tmp_path / "earlier", monkeypatch)
    install(earlier, "door", {"env": {"room": "earlier:Room"}}, at_ns=OLD_NS)
    expected = {"room": "earlier:Room", "hall": "later:Hall"}
    assert entries.installed("env") == expected
    new_process()
    assert entries.installed("env") == expected, "from the cache"


# ---------------------------------------------------------------- the cache


def test_later_process_reads_the_file_until_the_folder_changes(site: Path, tmp_path: Path):
    install(site, "door", {"env": {"room": "before:Room"}}, at_ns=OLD_NS)
    assert entries.installed("env") == {"room": "before:Room"}
    file = cache_file(tmp_path)
    kept = json.loads(file.read_text())
    kept[str(site)]["groups"]["env"]["room"] = "from_file:Room"
    file.write_text(json.dumps(kept))
    new_process()
    assert entries.installed("env") == {"room": "from_file:Room"}
    install(site, "hall", {"env": {"hall": "after:Hall"}}, at_ns=OLD_NS + 10**9)
    assert entries.installed("env") == {"room": "before:Room", "hall": "after:Hall"}
    new_process()
    assert entries.installed("env") == {"room": "before:Room", "hall": "after:Hall"}


def test_folder_that_may_still_change_is_not_kept(site: Path, tmp_path: Path):
    """An installer makes the folder of the metadata first, and then the file in it."""
    folder_ns = site.stat().st_mtime_ns
    install(site, "door", {}, at_ns=folder_ns)
    assert entries.installed("env") == {}
    install(site, "door", {"env": {"room": "door:Room"}}, at_ns=folder_ns)
    new_process()
    assert entries.installed("env") == {"room": "door:Room"}
    file = cache_file(tmp_path)
    assert not file.exists() or str(site) not in json.loads(file.read_text())


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"/site": 1}', b"[]"])
def test_corrupt_cache_is_replaced(content: bytes, site: Path, tmp_path: Path):
    install(site, "door", {"env": {"room": "door:Room"}}, at_ns=OLD_NS)
    file = cache_file(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert entries.installed("env") == {"room": "door:Room"}
    assert json.loads(file.read_bytes())[str(site)]["changed_ns"] == OLD_NS
    assert [*file.parent.iterdir()] == [file]


def test_home_that_cannot_be_written_keeps_nothing(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(site, "door", {"env": {"room": "door:Room"}}, at_ns=OLD_NS)
    (tmp_path / "file").write_text("")  # root could write into a folder without permissions
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert entries.installed("env") == {"room": "door:Room"}
    new_process()
    assert entries.installed("env") == {"room": "door:Room"}


def test_working_directory_is_searched_by_its_own_path(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two working directories of one time, as an archive leaves them, have their own entries."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        install(folder, "door", {"env": {name: "door:Room"}}, at_ns=OLD_NS)
        monkeypatch.chdir(folder)
        assert [*entries.installed("env")] == [name]


# ---------------------------------------------------------------- broken packages


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_here", "No module named 'no_such_module_here'"),
        ("", "has no attribute 'Room'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_broken_entry_point_is_one_line(
    source: str, reason: str, site: Path, capsys: pytest.CaptureFixture[str]
):
    (site / "broken_package.py").write_text(source)
    install(site, "broken", {"command": {"bake": "broken_package:Room"}}, at_ns=OLD_NS)
    assert cli.main(["bake"]) == 2
    sys.modules.pop("broken_package", None)
    shown = capsys.readouterr().err
    start = "error: the entry point broken_package:Room of an installed package cannot be loaded: "
    words = " ".join(shown.split())
    assert words.startswith(start) and reason in words, shown
    assert "Traceback" not in shown and words.endswith("or update that package, or remove it.")


@pytest.mark.parametrize("content", [b"[arealite.env]\nnonsense\n", b"\xff\xfe"])
def test_damaged_metadata_of_a_package_hides_no_other(content: bytes, site: Path):
    install(site, "damaged", {}, at_ns=OLD_NS)
    (site / "damaged-1.0.dist-info" / "entry_points.txt").write_bytes(content)
    install(site, "door", {"env": {"room": "door:Room"}}, at_ns=OLD_NS)
    assert entries.installed("env") == {"room": "door:Room"}


# ---------------------------------------------------------------- commands


def test_command_of_another_package_is_listed_suggested_and_called(
    site: Path, capsys: pytest.CaptureFixture[str]
):
    (site / "bakery.py").write_text(
        "def bake(argv):\n    print('baked', *argv)\n    return 7 if 'burnt' in argv else None\n"
    )
    install(site, "bakery", {"command": {"bake": "bakery:bake"}}, at_ns=OLD_NS)
    assert cli.main(["--help"]) == 0
    assert "bake of the installed package bakery" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["bakke"]) == 2
    assert "Did you mean 'bake'?" in capsys.readouterr().err
    assert cli.main(["bake", "bread"]) == 0
    assert cli.main(["bake", "burnt"]) == 7
    assert capsys.readouterr().out == "baked bread\nbaked burnt\n"
    sys.modules.pop("bakery")


def test_command_with_a_name_of_ours_is_not_listed_as_one(site: Path, capsys) -> None:
    commands = {"train": "bakery:main", "bake": "bakery:main"}
    install(site, "bakery", {"command": commands}, at_ns=OLD_NS)
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n  train ") == 1
    words = " ".join(text.split())
    assert "bake of the installed package bakery" in words
    assert "The command train of the installed package bakery never runs" in words
