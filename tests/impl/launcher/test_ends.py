"""A run ends with exit code 0 only if all of its work is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.base.errors import UserError
from arealite.ext.audit import audit as audit_module
from tests.impl.launcher.conftest import BALANCED
from tests.impl.launcher.test_local import ScriptedLauncher, launched, trains

EVALUATED = {"step": 3, "time": 2.0, "eval/reward": 0.5}
UNEVALUATED = {"step": 3, "time": 2.0, "eval/failed": 8.0}


def closed(
    root: Path, code: int, *lines: dict[str, float], is_sidecar: bool = False
) -> tuple[int, str, str]:
    """End a run of three steps whose roles exited with `code`; return (code, output, end.txt)."""
    launcher, shown = ScriptedLauncher(root, {}, steps=3, held_out="some"), list[str]()
    launcher.progress.say = shown.append  # type: ignore[method-assign]
    if is_sidecar:
        launcher.roles.remove(launcher.trainer)
    for line in lines:
        launcher.progress.show(line)
    ended = launcher._close(code)  # pyright: ignore[reportPrivateUsage]
    return ended, "\n".join(shown), launcher.paths.end.read_text()


def test_complete_run_exits_with_0(tmp_path: Path) -> None:
    code, shown, end = closed(tmp_path, 0, EVALUATED)
    assert (code, end) == (0, "exit code 0. \n")
    assert "error" not in shown


@pytest.mark.parametrize("code", [0, 4, 130])
@pytest.mark.parametrize(
    ("report", "lines", "reason"),
    [
        (replace(BALANCED, lost=["g1"]), [], "the ledger is out of balance"),
        (UserError("ledger.sqlite is no ledger"), [], "the ledger cannot be audited"),
        (replace(BALANCED, steps=0), [], "the trainer exited after 0 of 3 steps without a request"),
        (replace(BALANCED, steps=2), [], "the trainer exited after 2 of 3 steps without a request"),
        (BALANCED, [UNEVALUATED], "every sample of the last evaluation failed"),
    ],
)
def test_incomplete_run_exits_nonzero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Any, lines: Any, reason: str, code: int
) -> None:
    def audited(ledger: Path, **_: Any) -> Any:
        if isinstance(report, UserError):
            raise report
        return report

    monkeypatch.setattr(audit_module, "audit", audited)
    ended, shown, end = closed(tmp_path, code, *lines)
    is_good = code == 0 or (code == 130 and "balance" in reason)
    assert ended == (1 if is_good else code), "a worse end keeps its code"
    assert (f"error: {reason}" in shown) == is_good
    assert end.startswith(f"exit code {ended}. {reason if is_good else ''}")


def test_later_evaluation_with_a_result_replaces_one_without(tmp_path: Path) -> None:
    assert closed(tmp_path, 0, UNEVALUATED | {"step": 1}, EVALUATED)[0] == 0


def test_sidecar_of_torchrun_does_not_count_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "audit", lambda ledger, **_: replace(BALANCED, steps=1))
    assert closed(tmp_path, 0, is_sidecar=True)[0] == 0


def test_trainer_that_another_process_ends_early_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "audit", lambda ledger, **_: replace(BALANCED, steps=1))
    scripts = {"datapipe": "pass", "rollout": "pass", "trainer": trains(1)}
    code, shown, _ = launched(ScriptedLauncher(tmp_path, scripts, steps=3))
    assert code == 1
    assert "error: the trainer exited after 1 of 3 steps without a request" in shown


@pytest.mark.parametrize(("steps", "ended"), [([1, 2], 1), ([1, 2, 3], 0), ([], 0)])
def test_offline_trainer_has_to_train_every_step(
    tmp_path: Path, steps: list[int], ended: int
) -> None:
    launcher = ScriptedLauncher(tmp_path, {}, steps=3)
    trainer = replace(launcher.config.trainer, type="sft")
    launcher.config = replace(launcher.config, trainer=trainer)
    for step in steps:
        launcher.progress.show({"step": step, "train/epoch": 0.0, "train/total_steps": 3})
    assert launcher._close(0) == ended, "none: all were trained before"  # pyright: ignore
