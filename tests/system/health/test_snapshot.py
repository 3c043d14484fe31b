"""What a run is doing, from its files: whole, half written, written anew, moved, of other hosts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.base.config import save
from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.system.health.snapshot import QUIET_S, WINDOW, Metrics, Watch
from arealite.system.health.waits import KEEPER
from arealite.system.names.registry import NameRegistry
from tests.system.health.living import show, wait
from tests.system.health.run_folder import Run, line


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# ---------------------------------------------------------------- metrics


def test_metrics_are_taken_in_as_they_are_written(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(file)
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


@pytest.mark.parametrize("written", [[0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 3, 4]])
def test_steps_count_from_1_also_where_an_older_run_wrote_them(tmp_path: Path, written: list[int]):
    """The last: 0.1.0 wrote two steps, and a later version went on with the third."""
    file = tmp_path / "metrics.jsonl"
    evaluation = json.dumps({"step": 0, "time": -1.0, "eval/reward": 0.25}) + "\n"
    file.write_text(evaluation + "".join(line(step) for step in written))
    metrics = Metrics(file)
    assert [int(each["step"]) for each in metrics.poll()] == [0, 1, 2, 3, 4]
    assert metrics.steps == 4


def test_metrics_written_anew_are_read_anew_but_told_once(tmp_path: Path):
    file, anew = tmp_path / "metrics.jsonl", tmp_path / "anew"
    metrics = Metrics(file)
    file.write_text("".join(line(step, rollout__failed_episode_timeout=9.0) for step in range(5)))
    metrics.poll()
    anew.write_text(line(0) + line(1) + line(2, at=99.0, reward__mean=1.0))
    os.replace(anew, file)
    assert [each["time"] for each in metrics.poll()] == [99.0]
    assert metrics.curves["reward/mean"] == [0.5, 0.5, 1.0] and not metrics.failures


def test_a_line_that_is_none_hides_no_other(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0, "rew\n\nnull\n{"no": 1.0}\n' + line(1))
    assert [each["step"] for each in Metrics(file).poll()] == [1.0]


def test_failures_are_counted_over_the_run_though_workers_begin_anew(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    counts = [{"a": 2.0}, {"a": 5.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 4.0, "b": 3.0}]
    named = [{f"rollout__failed_{k}": v for k, v in each.items()} for each in counts]
    of_sources = {"rollout__failed_a__math": 7.0}
    file.write_text("".join(line(n, **each, **of_sources) for n, each in enumerate(named)))
    metrics = Metrics(file)
    metrics.poll()
    assert metrics.failures == {"a": 8, "b": 3}


def test_only_the_newest_lines_are_kept_whole(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(step) for step in range(3 * WINDOW)))
    metrics = Metrics(file)
    metrics.poll()
    assert len(metrics.recent) == WINDOW and len(metrics.curves["reward/mean"]) == 3 * WINDOW


# ---------------------------------------------------------------- the run


def test_a_folder_that_is_no_runs_is_refused_by_name(tmp_path: Path):
    with pytest.raises(UserError, match=r"is no run: .*config\.yaml.*Name a run's folder"):
        Watch(RunPaths(tmp_path))
    (tmp_path / "config.yaml").write_text("experiment_name: e\n")
    with pytest.raises(UserError, match="is no run"):
        Watch(RunPaths(tmp_path))


def seen(watch: Watch) -> tuple[str, bool]:
    return watch.read().state, watch.is_over


def test_a_run_is_seen_begin_live_and_end(run: Run):
    watch = Watch(run.paths)
    assert seen(watch) == ("not running", False), "just begun"
    show(run.vitals, "launcher-0")
    run.still_for(999)
    assert seen(watch) == ("not running", False), "it starts its roles"
    show(run.vitals, "trainer-0")
    run.paths.metrics.write_text(line(0) + line(1))
    shot = watch.read()
    assert (shot.metrics.steps, shot.total_steps, shot.state) == (2, 3, "running")
    with run.paths.metrics.open("a") as output:
        output.write(line(2))
    assert seen(watch) == ("running", False), "evaluates, or writes a checkpoint"
    (run.vitals / "trainer-0.json").unlink()
    assert seen(watch) == ("finished", False), "audits"
    (run.vitals / "launcher-0.json").unlink()
    assert seen(watch) == ("finished", True)


def test_a_run_that_died_is_over_when_its_files_stand_still(run: Run):
    watch = Watch(run.paths)
    show(run.vitals, "trainer-0", started=1)  # its pid is somebody else's now
    run.paths.metrics.write_text(line(0))
    assert seen(watch) == ("not running", False), "it may be started again"
    run.still_for(QUIET_S + 1)
    assert seen(watch) == ("not running", True)


def test_a_role_of_another_host_lives_by_its_signs(run: Run):
    watch = Watch(run.paths)
    run.still_for(999)
    show(run.vitals, "trainer-0", host="elsewhere", age_s=20.0)
    shot = watch.read()
    assert shot.state == "running" and shot.findings[0].cause == "silent"
    show(run.vitals, "trainer-0", host="elsewhere", age_s=90.0)
    assert seen(watch) == ("not running", True)


def test_who_holds_the_run_up_is_said_while_it_runs(run: Run):
    show(run.vitals, "datapipe-0", blocked_s=9.0)
    show(run.vitals, "trainer-0", wait("batch 1", "datapipe-0", 9.0))
    (finding,) = Watch(run.paths).read().findings
    assert (finding.blocker, finding.cause) == ("datapipe-0", "blocked")


def test_failures_are_seen_before_a_step_comes_of_it(run: Run):
    watch = Watch(run.paths)
    show(run.vitals, "rollout-0", counters={"failed_env_error": 7.0, "failed_a": 1.0, "ranks": 3})
    show(run.vitals, "rollout-1", counters={"failed_env_error": 2.0})
    assert watch.read().failures == {"env_error": 9, "a": 1}
    run.paths.metrics.write_text(line(0, rollout__failed_env_error=30.0))
    assert watch.read().failures == {"env_error": 30, "a": 1}, "as the datapipe has them"


def test_servers_are_those_with_a_live_name(run: Run):
    names = NameRegistry.of(run.config)
    names.put("llm_server", "h-1", {"version": 4, "load": {"running": 2}})
    (server,) = Watch(run.paths).read().servers
    assert server.id == "h-1" and server.value["version"] == 4 and server.age_s < 600.0
    show(run.vitals, "llm_server-h-1")
    assert Watch(run.paths).read().state == "not running", "a server may outlive its runs"


def test_a_config_written_anew_is_read_anew(run: Run):
    watch = Watch(run.paths)
    run.still_for(60)
    longer = TrainerConfig(ppo=PPOConfig(total_steps=9))
    watch.read()
    save(replace(run.config, trainer=longer), run.paths.config)
    assert watch.read().total_steps == 9


def test_a_run_that_is_moved_away_is_shown_as_it_was(run: Run):
    watch = Watch(run.paths)
    run.paths.metrics.write_text(line(0))
    watch.read()
    aside = run.paths.root.with_name("aside")
    run.paths.root.rename(aside)
    assert watch.read().metrics.steps == 1
    assert Watch(RunPaths(aside)).read().name == watch.read().name


def test_a_config_of_another_version_is_enough(run: Run):
    text = run.paths.config.read_text()
    older = [
        each for each in text.splitlines() if "heartbeat_s" not in each and "ttl_s" not in each
    ]
    run.paths.config.write_text("\n".join([*older, "unheard_of: 1"]))
    assert Watch(run.paths).read().total_steps == 3


def test_an_offline_run_says_how_long_it_is_with_its_first_step(tmp_path: Path):
    run = Run(tmp_path, type="sft")
    watch = Watch(run.paths)
    assert watch.read().total_steps == 0
    told = {"step": 0, "time": 0.0, "train/epoch": 0.0, "train/loss": 2.0, "train/total_steps": 7}
    run.paths.metrics.write_text(json.dumps(told) + "\n")
    shot = watch.read()
    assert (shot.total_steps, shot.kind, shot.metrics.curves["train/loss"]) == (7, "sft", [2.0])


def test_run_whose_roles_start_or_crash_is_running_and_names_them(run: Run):
    watch = Watch(run.paths)
    show(run.vitals, "launcher-0", wait("start", "trainer-0", 1.0, owner=KEEPER))
    shot = watch.read()
    assert shot.state == "running" and not watch.is_over
    assert [(each.blocker, each.cause) for each in shot.findings] == [("trainer-0", "starting")]
    why = "trainer-0 died (exit code 1: ValueError: x)"
    crashing = wait("restart 3 of 5", "trainer-0", 1.0, owner=KEEPER, detail=why)
    show(run.vitals, "launcher-0", crashing)
    (finding,) = watch.read().findings
    assert finding.cause == "crashing" and why in finding.detail
