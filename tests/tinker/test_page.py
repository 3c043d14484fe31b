"""The program of docs/tinker.md, as written, and keys of tenants in a file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tinker.conftest import serving

pytestmark = pytest.mark.tinker
PAGE = Path(__file__).parents[2] / "docs" / "tinker.md"


def test_program_of_the_page_runs_as_a_tenant_of_a_file(tiny: Path, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (lines,) = re.findall(r"```text\n(ann .*?)```", PAGE.read_text(), re.DOTALL)
    keys = tmp_path / "keys"
    keys.write_text(lines)
    keys.chmod(0o600)

    with serving(tiny, tmp_path, f"tinker.keys_file={keys}", name="org/digits") as service:
        service.key = lines.split()[1]
        printed = service.run("-c", program).splitlines()

    assert printed[0].startswith("{'loss:sum': ")
    assert re.fullmatch(r"\[\[(\d+, )*\d+\], \[(\d+, )*\d+\]\]", printed[1])


@pytest.mark.parametrize(
    ("text", "mode", "error"),
    [
        ("ann tml-short", 0o600, "line 1: use `TENANT KEY`"),
        ("ann tml-0123456789abcdef", 0o644, "others may read it. Run chmod 600"),
        ("../x tml-0123456789abcdef", 0o600, "line 1: use `TENANT KEY`"),
        ("# nobody", 0o600, "it has no tenant"),
    ],
)
def test_wrong_file_of_keys_is_one_line_before_anything_starts(
    text: str, mode: int, error: str, tiny: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(text)
    keys.chmod(mode)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "arealite.cli.main",
            "serve-tinker",
            f"model.path={tiny}",
            f"tinker.keys_file={keys}",
            f"cluster.run_root={tmp_path}/runs",
            f"cluster.name_root={tmp_path}/names",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode != 0
    assert error in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()
