"""A command parses each YAML file once and checks each config once; its roles do neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig, ServerConfig, run_paths
from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.cli import configs, resume, role, train
from arealite.cli.preflight import check_options
from tests.cli.small_run import small_run
from tests.fakes.loads import counted_loads
from tests.models import tiny_model

PLUGIN = """
from dataclasses import dataclass
from arealite.api.agent import Agent, agents

@dataclass(frozen=True, kw_only=True)
class CountedConfig:
    share: float = 0.5

@agents.register("counted", config=CountedConfig)
class Counted(Agent): ...
"""
COUNTED = "trainer.ppo.collector.agent.counted"
ONCE = {
    "async_ppo.yaml": 1,
    "llm_server.yaml": 1,
    "ExperimentConfig": 1,
    "ServerConfig": 1,
}


def test_command_loads_its_options_once_and_roles_load_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counted_plugin.py").write_text(PLUGIN)
    words = small_run(tmp_path, tiny_model(tmp_path / "model"))
    own = ["imports=[counted_plugin.py]", f"{COUNTED}.share=1", "launcher.llm_servers=1"]
    counts = counted_loads(monkeypatch)
    (config,) = configs.parse_stages([*words, *own], command="train", description="")
    check_options(config)
    with train.prepared(config) as run:
        assert counts == ONCE
        counts.clear()
        paths = run_paths(run)
        seen = list[tuple[str, int, ExperimentConfig]]()
        monkeypatch.setattr(role, "run", lambda *of_role: seen.append(of_role) or 0)
        for name in ("datapipe", "rollout", "trainer"):
            assert role.main([name, "1", str(paths.root)]) == 0
        argv = [str(paths.server)]
        server = configs.parse(ServerConfig, argv, command="serve-llm", description="")
    assert not counts
    assert seen == [(name, 1, run) for name in ("datapipe", "rollout", "trainer")]
    assert {type(loaded) for _, _, loaded in seen} == {type(run)}, "the same typed classes"
    share = seen[0][2].trainer.ppo.collector.agent.counted.share  # type: ignore[attr-defined]
    assert share == 1.0 and isinstance(share, float)
    assert server == configs.own_server(run)


def test_resumed_command_reads_the_record_of_the_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"cluster.run_root={tmp_path}", "imports=[]"]
    config = configs.load(ExperimentConfig, [], words)
    run_paths(config).root.mkdir(parents=True)
    resume.prepare_folder(config)
    (run_paths(config).checkpoints / "step-000002").mkdir(parents=True)
    monkeypatch.setattr(resume.checkpoint, "latest", lambda _: Path("step-000002"))
    counts = counted_loads(monkeypatch)
    changed = configs.load(ExperimentConfig, [], [*words, "seed=7", "trainer.ppo.lr=2e-6"])
    resume.prepare_folder(changed)
    assert counts == {"ExperimentConfig": 1, "saved": 1}
    shown = capsys.readouterr().out
    assert "changed options: seed=7 (was 1), trainer.ppo.lr=2e-06 (was 1e-05)" in shown


def test_each_stage_reads_its_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text("model: {path: m}")
    counts = counted_loads(monkeypatch)
    files = [str(tmp_path / "first.yaml"), "seed=3", "--then", str(tmp_path / "second.yaml")]
    stages = configs.parse_stages(files, command="train", description="")
    assert [stage.seed for stage in stages] == [3, 3]
    assert counts == {"first.yaml": 1, "second.yaml": 1, "ExperimentConfig": 2}


def test_resolved_config_takes_no_other_source(tmp_path: Path) -> None:
    file = tmp_path / "config.msgpack"
    config = configs.load(ExperimentConfig, [], ["seed=4"])
    config_tree.write(config, file)
    assert configs.load(ExperimentConfig, file, []) == config
    for files, words in (([file, file], []), ([file], ["seed=1"])):
        with pytest.raises(UserError, match=r"config\.msgpack is not readable YAML"):
            configs.load(ExperimentConfig, files, words)


def test_role_of_a_folder_without_a_resolved_config_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.msgpack is no resolved config.*arealite train"):
        role.main(["datapipe", "0", str(tmp_path)])


def test_command_ignores_options_of_parts_that_it_cannot_import(tmp_path: Path) -> None:
    """As `arealite.train` and environment children: the caller may be a notebook with classes."""
    file = tmp_path / "config.msgpack"
    agent = {"type": "chat", "of_a_cell": {"share": 1.0}}
    tree = {"seed": 4, "trainer": {"ppo": {"collector": {"agent": agent}}}}
    config_tree.write(tree, file)
    config = configs.load(ExperimentConfig, file, [])
    assert (config.seed, config.trainer.ppo.collector.agent.type) == (4, "chat")


def test_config_of_another_version_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.msgpack"
    config_tree.write({"gone": 1}, file)
    with pytest.raises(UserError, match=rf"^{file}: unknown key 'gone'\. Another version"):
        role.main(["datapipe", "0", str(tmp_path)])
