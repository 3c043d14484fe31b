"""The demo's model learns from a better model alone, without rewards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from arealite.ext.demo.sorting import make_kit, warm_up
from tests.learning.loop import learn

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]

TEACHER_ACCURACY = 0.7
GAIN = 0.08


def test_distillation_raises_the_accuracy_towards_the_teacher(tmp_path: Path) -> None:
    kit = make_kit(Path(__file__).resolve().parents[2] / "runs/demo/kit-seed1", seed=1)
    teacher = shutil.copytree(kit / "model", tmp_path / "teacher")
    warm_up(teacher, seed=1, accuracy=TEACHER_ACCURACY)
    before, after, metrics = learn(
        kit,
        tmp_path / "runs",
        "dr_grpo",
        f"trainer.ppo.distillation.teacher={teacher}",
        "trainer.ppo.distillation.only=true",
        teacher=teacher,
    )
    distances = [step["distillation/reverse_kl"] for step in metrics]
    print(f"distillation: {before:.3f} -> {after:.3f}, {distances[0]:.3f} -> {distances[-1]:.3f}")
    assert after >= before + GAIN
    assert distances[-1] < distances[0]
