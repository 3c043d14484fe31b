"""A lock is held by one process, named in the refusal, and gone with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.base.errors import UserError
from arealite.system.locks import held, holder, lock_folder, remove_unheld

HOLD = """
import sys
from pathlib import Path
from arealite.system.locks import held
with held(Path(sys.argv[1]), fix="wait"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_refused_until_the_first_is_dead(tmp_path: Path):
    file = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with (
            pytest.raises(UserError, match=rf"in use by process {first.pid}\. Stop it\."),
            held(file, fix="Stop it."),
        ):
            pass
        assert holder(file) == first.pid
        first.kill()
        assert first.wait(60) != 0
    assert holder(file) == 0, "its id may be another process's by now"
    with held(file, fix="Stop it."):
        pass


def test_it_is_free_after_its_body(tmp_path: Path):
    for _ in range(2):
        with held(tmp_path / "lock", fix="Stop it."):
            pass


def test_id_in_a_lock_file_holds_nothing_by_itself(tmp_path: Path):
    file = tmp_path / "lock"
    assert holder(file) == 0
    file.write_text(str(os.getpid()))
    assert holder(file) == 0
    with held(file, fix="Stop it."):
        assert holder(file) == os.getpid()


def test_folders_of_living_processes_are_not_removed(tmp_path: Path):
    alive, dead = tmp_path / "alive", tmp_path / "dead"
    for folder in (alive, dead):
        folder.mkdir()
        (folder / "file").touch()
    handle = lock_folder(alive)
    remove_unheld([alive, dead, tmp_path / "none"])
    assert alive.exists() and not dead.exists()
    os.close(handle)
    remove_unheld([alive])
    assert not alive.exists()
