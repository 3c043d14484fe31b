"""Commands of an example's docstring that are more than the example itself, typed as they stand.

tests/docs/test_commands.py checks without running it that each docstring names what is there; the
one command that most have for a laptop is run by the other tests of this folder.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from arealite.base.names import RunPaths
from arealite.system.ledger.audit import audit
from tests.docs import tutorial
from tests.examples.conftest import EXAMPLES, LIMIT_S

pytestmark = [pytest.mark.examples, pytest.mark.timeout(2 * LIMIT_S)]
SMALL = "trainer.ppo.total_steps=2 trainer.ppo.batch_size=64 trainer.ppo.eval.num_prompts=16"


def blocks(name: str) -> list[str]:
    """Return the indented blocks of an example's docstring."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    found = re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    return [re.sub("^ {4}", "", block, flags=re.MULTILINE) for block in found]


def test_an_external_server_is_started_and_used_as_the_docstring_says(
    kit: Callable[[str], Path], tmp_path: Path
) -> None:
    """On the port that it names, which is below those that the system gives to other tests."""
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
