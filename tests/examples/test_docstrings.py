"""Run commands of an example's docstring beyond the example itself, as written.

tests/docs/test_commands.py checks the commands of all docstrings without running them. Other tests
of this folder run the laptop command of each example.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from tests.docs import tutorial
from tests.examples.conftest import EXAMPLES, LIMIT_S

pytestmark = [pytest.mark.examples, pytest.mark.timeout(2 * LIMIT_S)]
SMALL = "trainer.ppo.total_steps=2 trainer.ppo.batch_size=64 trainer.ppo.eval.num_prompts=16"


def blocks(name: str) -> list[str]:
    """Return the indented blocks of an example's docstring."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    found = re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    return [re.sub("^ {4}", "", block, flags=re.MULTILINE) for block in found]


def test_commands_of_the_external_server_docstring_work(
    kit: Callable[[str], Path], tmp_path: Path
) -> None:
    """The docstring's port is below the ephemeral range, so no other test uses it."""
    _, laptop = blocks("external_sglang")
    typed, last = laptop.rstrip().rsplit("\n", 1)
    assert last == "python3 examples/external_sglang.py"
    where, page = tmp_path / "reader", tmp_path / "page.md"
    shutil.copytree(kit("sorting"), where / "runs/examples/kits/sorting")
    page.write_text(f"```bash\n{typed}\n{last} {SMALL}\nkill %1\n```\n")
    tutorial.run(page, where, tmp_path, timeout_s=LIMIT_S)
    run = RunPaths(where / "runs/examples/external_sglang-laptop")
    balance = audit(run.ledger)
    assert balance.ok and balance.steps == 2, balance.table()
