"""What the README tells people to type, typed: its commands and its custom agent, word for word."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Site
from tests.waiting import until

README = (ROOT / "README.md").read_text()
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def block(after: str, language: str) -> str:
    """Return the first code block of a language below a heading."""
    below = README.split(f"## {after}\n", 1)[1]
    return re.search(rf"```{language}\n(.*?)```", below, re.DOTALL).group(1)  # type: ignore[union-attr]


def words(line: str) -> list[str]:
    """Split a command line, with this interpreter and this checkout in place of the reader's."""
    found = [str(ROOT / w) if (ROOT / w).is_file() else w for w in shlex.split(line)]
    if found[0] == "arealite":
        return [sys.executable, "-m", "arealite.cli.main", *found[1:]]
    assert found[0] == "python3"
    return [sys.executable, *found[1:]]


def test_the_commands_by_hand(tmp_path: Path):
    joined = block("By hand", "bash").replace("\\\n", " ")
    kit, serve, train, audit = [line for line in joined.splitlines() if line.strip()]
    names = f"cluster.name_root={tmp_path / 'names'}"
    subprocess.run(words(kit), cwd=tmp_path, env=ENVIRONMENT, check=True, timeout=SLOW_S)
    with subprocess.Popen(
        [*words(serve.rstrip(" &")), names],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            registered = lambda: list((tmp_path / "names").rglob("llm_server/*.json"))  # noqa: E731
            started = lambda: registered() or server.poll() is not None  # noqa: E731
            until(started, what="the server", seconds=SLOW_S)
            done = subprocess.run(
                [*words(train), names, "trainer.ppo.total_steps=4"],
                cwd=tmp_path,
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
                timeout=SLOW_S,
            )
        finally:
            server.terminate()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4/4" in done.stdout
    lines = (tmp_path / "runs/demo/mine/metrics.jsonl").read_text().splitlines()
    steps = [m for m in map(json.loads, lines) if "reward/mean" in m]
    assert any(m["update/grad_norm"] > 0 for m in steps), "the warm model has something to learn"
    current = [m for m in steps if m["mismatch/current_tokens"] > 0]
    assert current, "the first batch at least is of the current version"
    assert all(m["mismatch/logprob_abs_diff_mean_current"] <= 1e-4 for m in current)
    shown = subprocess.run(
        words(audit), cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert "nothing lost, nothing repeated" in shown.stdout


def test_the_custom_agent(site: Site, tmp_path: Path):
    (tmp_path / "my_agent.py").write_text(block("Add your own agent", "python"))
    command = re.search(r"python3 train\.py (imports.*?) …", README, re.DOTALL).group(1)  # type: ignore[union-attr]
    overrides = shlex.split(command.replace("\\\n", " "))
    done = site.train(tmp_path, *overrides, "trainer.ppo.total_steps=1")
    assert done.code == 0, done.shown + done.logs()
    assert "my_param: hello" in done.paths.config.read_text()
