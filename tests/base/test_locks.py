"""One process at a time has a lock; the error names it; the lock is released when it exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.base.errors import UserError
from arealite.base.files import lock_file, lock_folder, remove_unlocked
from arealite.ext.view.why import lock_holder

HOLD = """
import sys
from pathlib import Path
from arealite.base.files import lock_file
with lock_file(Path(sys.argv[1]), fix="wait"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_second_process_is_refused_until_the_first_exits(tmp_path: Path):
    file = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with (
            pytest.raises(UserError, match=rf"in use by process {first.pid}\. Stop it\."),
            lock_file(file, fix="Stop it."),
        ):
            pass
        assert lock_holder(file) == first.pid
        first.kill()
        assert first.wait(60) != 0
    assert lock_holder(file) == 0, "another process may have its id"
    with lock_file(file, fix="Stop it."):
        pass


def test_lock_is_released_after_the_body(tmp_path: Path):
    for _ in range(2):
        with lock_file(tmp_path / "lock", fix="Stop it."):
            pass


def test_process_id_in_a_file_is_no_lock(tmp_path: Path):
    file = tmp_path / "lock"
    assert lock_holder(file) == 0
    file.write_text(str(os.getpid()))
    assert lock_holder(file) == 0
    with lock_file(file, fix="Stop it."):
        assert lock_holder(file) == os.getpid()


def test_folders_of_living_processes_are_not_removed(tmp_path: Path):
    alive, dead = tmp_path / "alive", tmp_path / "dead"
    for folder in (alive, dead):
        folder.mkdir()
        (folder / "file").touch()
    handle = lock_folder(alive)
    remove_unlocked([alive, dead, tmp_path / "none"])
    assert alive.exists() and not dead.exists()
    os.close(handle)
    remove_unlocked([alive])
    assert not alive.exists()
