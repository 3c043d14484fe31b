"""A launcher without extensions: roles are new processes, and the metrics count the steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base import entries
from arealite.base.errors import UserError
from arealite.cli import serve_llm, train
from arealite.ext.view.terminal import Terminal
from arealite.impl.launcher.processes import NewProcesses, starters
from arealite.system.names.name_registry import with_externals
from tests.impl.launcher.test_local import ScriptedLauncher, launched, trains


@pytest.fixture(autouse=True)
def no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "hooks", lambda group: [])


@pytest.mark.parametrize(("step", "code"), [(1, 0), (0, 1)])
def test_run_ends_with_0_once_every_step_is_trained(tmp_path: Path, step: int, code: int) -> None:
    trainer = trains(step) if step else "pass"
    scripts = {"datapipe": "pass", "rollout": "pass", "trainer": trainer}
    ended, shown, launcher = launched(ScriptedLauncher(tmp_path, scripts))
    assert ended == code, shown
    assert isinstance(launcher.starter, NewProcesses)
    assert "audit" not in shown and "offered" not in shown


def test_panel_is_left_out_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = ScriptedLauncher(tmp_path, {})
    monkeypatch.setattr(Terminal, "is_drawable", True)
    with launcher.progress.shown():
        launcher.progress.show({"step": 1, "reward/mean": 0.5})
    assert capsys.readouterr().out.startswith("step 1/")


def test_command_and_role_need_no_starter() -> None:
    starters().begin()
    with starters().early(ExperimentConfig()):
        pass
    assert isinstance(starters().of_server(ServerConfig()), NewProcesses)


async def test_work_runs_without_external_servers() -> None:
    done = list[str]()

    async def work() -> None:
        done.append("work")

    await with_externals(ExperimentConfig(), work())
    assert done == ["work"]


def test_server_needs_a_model() -> None:
    with pytest.raises(UserError, match=r"model\.path is not set"):
        serve_llm.with_default_model(ServerConfig())


def test_rank_of_another_launcher_is_refused() -> None:
    with pytest.raises(UserError, match="unset RANK"):
        train.run_rank(ExperimentConfig())
