"""`arealite serve` prints its address once and exits on a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from arealite.cli import main as cli

pytestmark = pytest.mark.processes
ROOT = Path(__file__).resolve().parents[3]
LOUD = """
from arealite.api.env import StepEnv, StepResult, envs
print("said at import")

@envs.register("loud")
class Loud(StepEnv):
    async def reset(self, task):
        print("x" * 1_000_000)
        return None, task.prompt

    async def step(self, state, action):
        return StepResult("over", 1.0, True)
"""


@contextmanager
def serve(*words: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield its process and the first line of its stdout."""
    command = [sys.executable, "-m", "arealite.cli.main", "serve", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_custom_environment_is_served_with_rows_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "loud_env.py").write_text(LOUD)
    rows = [json.dumps({"prompt": f"row {n}"}) for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = ["env.type=loud", "imports=[loud_env]", "tasks=rows.jsonl"]
    with serve(*words, folder=tmp_path) as (process, line):
        address = line.removeprefix("serving on ").strip()
        assert address.startswith("127.0.0.1:"), line
        seen = {
            post(f"http://{address}/reset", {"seed": seed})["observation"]["content"]
            for seed in range(6)
        }
        assert seen == {"row 0", "row 1", "row 2"}
        said = post(f"http://{address}/step", {"seed": 1, "action": {"text": "a"}})
        assert (said["done"], said["reward"]) == (True, 1.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["env.type=loudest"], "Unknown env type"),
        (["server.port=70000"], "at most 65535"),
        (["server.hots=x"], "Did you mean"),
        (["tasks=none.jsonl"], "none.jsonl"),
        (["server.host=203.0.113.1"], "cannot listen"),
        (["server.token_env=NO_SUCH_TOKEN"], "environment variable is not set"),
        (["--environments", "math,reverze"], "Did you mean 'reverse'"),
        (["--port", "fast"], "server.port"),
    ],
)
def test_invalid_serve_arguments_are_a_one_line_error(
    words: list[str], says: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "arealite.cli.main", "serve", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert says in ended.stderr
    assert ended.stdout == ""


def test_flags_start_one_server_of_several_environments(tmp_path: Path) -> None:
    words = ["--environments", "math,reverse,debate", "--port", "0", "env.reverse.length=3"]
    with serve(*words, folder=tmp_path) as (process, line):
        address = line.removeprefix("serving on ").strip()
        with urllib.request.urlopen(f"http://{address}/environments", timeout=120) as answer:
            assert [each["name"] for each in json.load(answer)] == ["math", "reverse", "debate"]
        first = post(f"http://{address}/env/reverse/reset", {"seed": 1})
        again = post(f"http://{address}/reset", {"seed": 1, "env": "reverse"})
        assert first == again
        letters = first["observation"]["content"].split()[-1]
        assert len(letters.strip(".:")) == 3, first
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_serve_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "server.max_sessions=" in shown
    assert "env.type=" in shown
    assert "--environments A,B,C" in shown
