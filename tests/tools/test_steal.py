"""The tool that takes CPUs away while a command runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from tools import steal


@pytest.mark.parametrize("words", [[], ["0.5"], ["half", "true"], ["1.0", "true"], ["0", "true"]])
def test_invalid_arguments_of_steal_are_a_one_line_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert steal.main(words) == 2
    assert capsys.readouterr().err.startswith("error: give the share to take")


def test_missing_permission_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert steal.main(["0.5", "true"]) == 2
    assert "needs Linux and root" in capsys.readouterr().err


def test_each_cpu_has_a_stealing_process_and_the_exit_code_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(cpu: int, share: float, parent: int) -> None:
        (tmp_path / f"{cpu} {share} {parent == os.getppid()}").touch()

    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(steal, "steal", note)
    monkeypatch.setenv("STEAL", "0.25")
    assert steal.main(["0.25", "sh", "-c", 'exit "${STEAL-7}"']) == 7
    cpus = {f"{cpu} 0.25 True" for cpu in os.sched_getaffinity(0)}
    until(lambda: {file.name for file in tmp_path.iterdir()} == cpus, what="a thief a CPU")


def test_stealing_process_exits_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    parents = iter([1, 1, 2])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(steal, "LONGEST_S", 0.001)
    steal.steal(0, 0.5, 1)
    assert not [*parents]
