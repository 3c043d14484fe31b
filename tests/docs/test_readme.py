"""Run the commands and the custom agent of the README as written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import tutorial
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S
from tests.waiting import until

README = (ROOT / "README.md").read_text()
pytestmark = [
    pytest.mark.docs,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("readme"),  # its fixtures are expensive
]


def block(after: str, language: str) -> str:
    """Return the first code block of a language below a heading."""
    below = README.split(f"## {after}\n", 1)[1]
    return re.search(rf"```{language}\n(.*?)```", below, re.DOTALL).group(1)  # type: ignore[union-attr]


def words(line: str) -> list[str]:
    """Split a command line; use this interpreter and this checkout."""
    found = [str(ROOT / w) if (ROOT / w).is_file() else w for w in shlex.split(line)]
    if found[0] == "arealite":
        return [sys.executable, "-m", "arealite.cli.main", *found[1:]]
    assert found[0] == "python3"
    return [sys.executable, *found[1:]]


def commands(after: str) -> list[str]:
    """Return the command lines of the first bash block below a heading."""
    joined = block(after, "bash").replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kit: Path) -> Path:
    """Return the working folder, with the kit that the first command creates."""
    assert commands("By hand")[0] == f"python3 {tutorial.KIT}"
    made = tmp_path_factory.mktemp("reader")
    shutil.copytree(kit, made / "kit")
    return made


def run(line: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*words(line), *overrides],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=SLOW_S,
    )


def test_commands_by_hand_work(folder: Path):
    _, serve, train, audit = commands("By hand")
    names = f"cluster.name_root={folder / 'names'}"
    with subprocess.Popen(
        [*words(serve.rstrip(" &")), names],
        cwd=folder,
        env=ENVIRONMENT,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            registered = lambda: list((folder / "names").rglob("llm_server/*.json"))  # noqa: E731
            started = lambda: registered() or server.poll() is not None  # noqa: E731
            until(started, what="the server", seconds=SLOW_S)
            done = run(train, folder, names, "trainer.ppo.total_steps=4")
        finally:
            server.terminate()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4/4" in done.stdout
    lines = (folder / "runs/demo/mine/metrics.jsonl").read_text().splitlines()
    steps = [m for m in map(json.loads, lines) if "reward/mean" in m]
    assert any(m["update/grad_norm"] > 0 for m in steps), "the warm model has something to learn"
    current = [m for m in steps if m["mismatch/current_tokens"] > 0]
    assert current, "the first batch at least is of the current version"
    assert all(m["mismatch/logprob_abs_diff_mean_current"] <= 1e-4 for m in current)
    shown = run(audit, folder)
    assert shown.returncode == 0
    assert "nothing lost, nothing repeated" in shown.stdout


def test_custom_agent_of_the_readme_trains(folder: Path):
    (folder / "my_agent.py").write_text(block("Add your own agent", "python"))
    (line,) = commands("Add your own agent")
    line = line.replace("runs/demo/kit-seed1", "kit")  # `make demo` creates this kit
    names = f"cluster.name_root={folder / 'others'}"
    done = run(line, folder, names, "trainer.ppo.total_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    assert "my_param: hello" in (folder / "runs/demo/my_agent/config.yaml").read_text()
