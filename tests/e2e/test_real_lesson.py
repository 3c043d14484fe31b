"""Five steps of a lesson with SmolLM2, as `arealite quickstart` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.smollm2 import smollm2

STEPS = 5
PROGRAM = """
import dataclasses, sys
from pathlib import Path
from arealite.base import outputs
from arealite.ext.demo.lesson_command import LessonRun
from arealite.ext.demo.lessons import sums

outputs.protect()
options = [word for word in sums.LESSON.options if "batch_size" not in word]
small = dataclasses.replace(
    sums.LESSON, eval_rows=8, eval_samples=1, options=[*options, "trainer.ppo.batch_size=16"]
)
words = [f"trainer.ppo.total_steps={sys.argv[2]}", "cluster.name_root=names"]
run = LessonRun("sums", small, model=Path(sys.argv[1]), seed=1, words=words)
sys.exit(run.run())
"""


@pytest.mark.timeout(600)
def test_five_steps_with_smollm2_are_measured_and_balanced(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(smollm2()), str(STEPS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "sums-seed1"
    result = json.loads((folder / "result.json").read_text())
    assert result["audit"] == "balanced"
    assert set(result["measured"]) == {"pretrained", "training"}
    for measured in result["measured"].values():
        assert 0.0 <= measured["reward"]["mean"] <= 1.0
    lines = (folder / "training" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert max(line["step"] for line in steps) == STEPS
    assert max(line.get("update/grad_norm", 0.0) for line in steps) > 0.0
    assert "self-check passed" in (folder / "training" / "logs" / "trainer-0.log").read_text()
    assert (folder / "training" / "report.html").stat().st_size > 10_000
    assert (folder / "training" / "export" / "model.safetensors").exists()
