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


@pytest.fixture(scope="module")
def kit() -> Path:
    return make_kit(Path(__file__).resolve().parents[2] / "runs/demo/kit-seed1", seed=1)


@pytest.fixture(scope="module")
def teacher(kit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(kit / "model", folder)
    warm_up(folder, seed=1, accuracy=TEACHER_ACCURACY)
    return folder


@pytest.mark.parametrize(("top_k", "kl"), [(0, "reverse"), (5, "reverse"), (5, "forward")])
def test_distillation_raises_the_accuracy_towards_the_teacher(
    kit: Path, teacher: Path, tmp_path: Path, top_k: int, kl: str
) -> None:
    before, after, metrics = learn(
        kit,
        tmp_path / "runs",
        "dr_grpo",
        f"trainer.ppo.distillation.teacher={teacher}",
        "trainer.ppo.distillation.only=true",
        f"trainer.ppo.distillation.top_k={top_k}",
        f"trainer.ppo.distillation.kl={kl}",
        teacher=teacher,
    )
    distances = [step["distillation/reverse_kl"] for step in metrics]
    print(f"{kl} {top_k}: {before:.3f} -> {after:.3f}, {distances[0]:.3f} -> {distances[-1]:.3f}")
    assert after >= before + GAIN
    assert distances[-1] < distances[0]
