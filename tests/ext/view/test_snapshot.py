"""A run's state from its files: complete, half written, rewritten, moved, of other hosts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.base.config import save
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.view.snapshot import QUIET_S, WINDOW, MetricsReader, RunReader
from arealite.impl.logger.metrics_file import is_step
from arealite.system.health.waits import SUPERVISOR
from arealite.system.names.name_registry import NameRegistry
from tests.system.health.living import show, wait
from tests.system.health.run_folder import Run, line


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# ---------------------------------------------------------------- metrics


def test_metrics_are_read_as_the_file_grows(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsReader(file)
    assert metrics.poll() == [], "no file yet"
    evaluation = json.dumps({"step": 0, "time": -1.0, "eval/reward": 0.25}) + "\n"
    file.write_text(evaluation + line(1) + line(2, reward__mean=0.75)[:20])
    assert [int(each["step"]) for each in metrics.poll()] == [0, 1]
    with file.open("a") as output:
        output.write(line(2, reward__mean=0.75)[20:])
    assert [each["reward/mean"] for each in metrics.poll()] == [0.75]
    assert metrics.curves["reward/mean"] == [0.5, 0.75]
    assert metrics.evals[0]["eval/reward"] == 0.25
    assert metrics.poll() == []


def test_rewritten_metrics_are_read_again_but_returned_once(tmp_path: Path):
    file, anew = tmp_path / "metrics.jsonl", tmp_path / "anew"
    metrics = MetricsReader(file)
    file.write_text("".join(line(step, rollout__failed_episode_timeout=9.0) for step in range(5)))
    metrics.poll()
    anew.write_text(line(0) + line(1) + line(2, at=99.0, reward__mean=1.0))
    os.replace(anew, file)
    assert [each["time"] for each in metrics.poll()] == [99.0]
    assert metrics.curves["reward/mean"] == [0.5, 0.5, 1.0] and not metrics.failures


def test_invalid_line_is_skipped(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0, "rew\n\nnull\n{"no": 1.0}\n' + line(1))
    assert [each["step"] for each in MetricsReader(file).poll()] == [1.0]


def test_failures_are_summed_over_restarts_of_workers(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    counts = [{"a": 2.0}, {"a": 5.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 4.0, "b": 3.0}]
    named = [{f"rollout__failed_{k}": v for k, v in each.items()} for each in counts]
    of_sources = {"rollout__failed_a__math": 7.0}
    file.write_text("".join(line(n, **each, **of_sources) for n, each in enumerate(named)))
    metrics = MetricsReader(file)
    metrics.poll()
    assert metrics.failures == {"a": 8, "b": 3}


def test_only_the_newest_lines_are_kept_completely(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(step) for step in range(3 * WINDOW)))
    metrics = MetricsReader(file)
    metrics.poll()
    assert len(metrics.recent) == WINDOW and len(metrics.curves["reward/mean"]) == 3 * WINDOW


# ---------------------------------------------------------------- the run


def test_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"is no run folder: .*config\.yaml.*Give a run folder"):
        RunReader(RunPaths(tmp_path))
    (tmp_path / "config.yaml").write_text("experiment_name: e\n")
    with pytest.raises(UserError, match="is no run folder"):
        RunReader(RunPaths(tmp_path))


def seen(watch: RunReader) -> tuple[str, bool]:
    return watch.read().state, watch.is_over


def test_states_of_a_run_from_start_to_end(run: Run):
    watch = RunReader(run.paths)
    assert seen(watch) == ("not running", False), "no process yet"
    show(run.vitals, "launcher-0")
    run.still_for(999)
    assert seen(watch) == ("not running", False), "the launcher starts its roles"
    show(run.vitals, "trainer-0")
    run.paths.metrics.write_text(line(1) + line(2))
    shot = watch.read()
    assert (shot.metrics.steps, shot.total_steps, shot.state) == (2, 3, "running")
    with run.paths.metrics.open("a") as output:
        output.write(line(3))
    assert seen(watch) == ("running", False), "an evaluation or a checkpoint may follow"
    (run.vitals / "trainer-0.json").unlink()
    assert seen(watch) == ("finished", False), "the launcher audits"
    (run.vitals / "launcher-0.json").unlink()
    assert seen(watch) == ("finished", True)


def test_what_a_run_does_before_its_first_step_is_shown(run: Run):
    watch, names = RunReader(run.paths), NameRegistry.of(run.config)
    assert watch.read().now == "", "no process yet"
    show(run.vitals, "datapipe-0")
    assert watch.read().now == "the processes start"
    show(run.vitals, "trainer-0")
    assert watch.read().now == "the trainer loads the model"
    batch = wait("BatchRequest 0", "datapipe-0", 1.0, detail="batch 0: 3 of 64 groups")
    show(run.vitals, "trainer-0", batch)
    assert "no language-model server has started yet" in watch.read().now
    names.put("llm_server", "a", {})
    assert watch.read().now == "batch 0: 3 of 64 groups"
    show(run.vitals, "trainer-0", wait("ranks to meet", "", 1.0))
    assert watch.read().now == "the trainer waits for ranks to meet of any process"
    run.paths.metrics.write_text(line(1))
    assert watch.read().now == ""


def test_crashed_run_is_over_when_its_files_no_longer_change(run: Run):
    watch = RunReader(run.paths)
    show(run.vitals, "trainer-0", started=1)  # another process has its pid
    run.paths.metrics.write_text(line(1))
    assert seen(watch) == ("not running", False), "it may be restarted"
    run.still_for(QUIET_S + 1)
    assert seen(watch) == ("not running", True)


def test_role_of_another_host_is_alive_by_its_heartbeat(run: Run):
    watch = RunReader(run.paths)
    run.still_for(999)
    show(run.vitals, "trainer-0", host="elsewhere", age_s=20.0)
    shot = watch.read()
    assert shot.state == "running" and shot.findings[0].cause == "silent"
    show(run.vitals, "trainer-0", host="elsewhere", age_s=90.0)
    assert seen(watch) == ("not running", True)


def test_snapshot_of_a_running_run_has_its_findings(run: Run):
    show(run.vitals, "datapipe-0", blocked_s=9.0)
    show(run.vitals, "trainer-0", wait("batch 1", "datapipe-0", 9.0))
    (finding,) = RunReader(run.paths).read().findings
    assert (finding.blocker, finding.cause) == ("datapipe-0", "blocked")


def test_failures_are_counted_before_the_first_step(run: Run):
    watch = RunReader(run.paths)
    show(run.vitals, "rollout-0", counters={"failed_env_error": 7.0, "failed_a": 1.0, "ranks": 3})
    show(run.vitals, "rollout-1", counters={"failed_env_error": 2.0})
    assert watch.read().failures == {"env_error": 9, "a": 1}
    run.paths.metrics.write_text(line(1, rollout__failed_env_error=30.0))
    assert watch.read().failures == {"env_error": 30, "a": 1}, "the datapipe's count of the class"


def test_servers_have_a_live_name(run: Run):
    names = NameRegistry.of(run.config)
    names.put("llm_server", "h-1", {"version": 4, "load": {"running": 2}})
    (server,) = RunReader(run.paths).read().servers
    assert server.id == "h-1" and server.value["version"] == 4 and server.age_s < 600.0
    show(run.vitals, "llm_server-h-1")
    assert RunReader(run.paths).read().state == "not running", "a server may outlive its runs"


def test_changed_config_is_read_again(run: Run):
    watch = RunReader(run.paths)
    run.still_for(60)
    longer = TrainerConfig(ppo=PPOConfig(total_steps=9))
    watch.read()
    save(replace(run.config, trainer=longer), run.paths.config)
    assert watch.read().total_steps == 9


def test_moved_run_keeps_its_last_state(run: Run):
    watch = RunReader(run.paths)
    run.paths.metrics.write_text(line(1))
    watch.read()
    aside = run.paths.root.with_name("aside")
    run.paths.root.rename(aside)
    assert watch.read().metrics.steps == 1
    assert RunReader(RunPaths(aside)).read().name == watch.read().name


def test_config_of_another_version_is_readable(run: Run):
    text = run.paths.config.read_text()
    older = [
        each for each in text.splitlines() if "heartbeat_s" not in each and "ttl_s" not in each
    ]
    run.paths.config.write_text("\n".join([*older, "unheard_of: 1"]))
    assert RunReader(run.paths).read().total_steps == 3


def test_total_steps_of_an_offline_run_are_known_from_its_first_step(tmp_path: Path):
    run = Run(tmp_path, type="sft")
    watch = RunReader(run.paths)
    assert watch.read().total_steps == 0
    told = {"step": 0, "time": 0.0, "train/epoch": 0.0, "train/loss": 2.0, "train/total_steps": 7}
    run.paths.metrics.write_text(json.dumps(told) + "\n")
    shot = watch.read()
    assert (shot.total_steps, shot.kind, shot.metrics.curves["train/loss"]) == (7, "sft", [2.0])


def test_run_whose_roles_start_or_crash_is_running_with_findings(run: Run):
    watch = RunReader(run.paths)
    show(run.vitals, "launcher-0", wait("start", "trainer-0", 1.0, owner=SUPERVISOR))
    shot = watch.read()
    assert shot.state == "running" and not watch.is_over
    assert [(each.blocker, each.cause) for each in shot.findings] == [("trainer-0", "starting")]
    why = "trainer-0 died (exit code 1: ValueError: x)"
    crashing = wait("restart 3 of 5", "trainer-0", 1.0, owner=SUPERVISOR, detail=why)
    show(run.vitals, "launcher-0", crashing)
    (finding,) = watch.read().findings
    assert finding.cause == "crashing" and why in finding.detail


def test_step_without_a_reward_is_a_step() -> None:
    assert is_step({"step": 3, "time": 1.0, "time/step_s": 2.0})
    assert not is_step({"step": 3, "time": 1.0, "eval/reward": 2.0})
