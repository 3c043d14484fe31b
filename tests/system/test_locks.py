"""A lock is held by one process, named in the refusal, and gone with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arealite.base.errors import UserError
from arealite.system.locks import held

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
        first.kill()
        assert first.wait(60) != 0
    with held(file, fix="Stop it."):
        pass


def test_it_is_free_after_its_body(tmp_path: Path):
    for _ in range(2):
        with held(tmp_path / "lock", fix="Stop it."):
            pass
