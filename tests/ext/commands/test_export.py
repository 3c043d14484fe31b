"""`arealite export` writes a folder that transformers loads, with the weights of the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arealite.api.engine import Training
from arealite.api.experiment_config import ExperimentConfig
from arealite.base import config as base_config
from arealite.base.trial_files import RunPaths
from arealite.cli import configs
from arealite.cli import main as cli
from arealite.impl.trainer.base import make_engine, write_engines
from arealite.impl.trainer.rank_group import World
from tests.models import tiny_model


def make_run(folder: Path, *overrides: str, head: str = "lm") -> RunPaths:
    """Write a run with checkpoints of steps 2 and 4, whose parameters are all 2 and all 4."""
    paths, empty = RunPaths(folder / "run"), folder / "empty.yaml"
    paths.root.mkdir()
    empty.write_text("")
    words = [f"model.path={tiny_model(folder / 'model')}", *overrides]
    config = configs.load(ExperimentConfig, empty, words)
    options = config.trainer.offline if config.trainer.is_offline else config.trainer.ppo
    world = World.init(threads=1, seed=1)
    training = Training(optimizer=options.optimizer, lr=options.lr, total_updates=10)
    engine = make_engine(config, training=training, head=head)  # type: ignore[arg-type]
    for step in (2, 4):
        for parameter in engine.module.parameters():
            parameter.data.fill_(float(step))
        path = paths.checkpoints / f"step-{step:06d}"
        write_engines(path, {".": engine}, {"step": step}, world)
    world.destroy()
    part = "offline" if config.trainer.is_offline else "ppo"
    many = f"trainer.{part}.engine.fsdp.shard_size=8"  # as with eight ranks
    base_config.save(configs.load(ExperimentConfig, empty, [*words, many]), paths.config)
    return paths


def values(folder: Path) -> set[float]:
    tensors = load_file(folder / "model.safetensors").values()
    return {float(value) for tensor in tensors for value in tensor.unique()}


def test_newest_checkpoint_or_the_given_step_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    paths = make_run(tmp_path)
    assert cli.main(["export", str(paths.root)]) == 0
    newest = paths.root / "export-step-000004"
    assert capsys.readouterr().out.splitlines()[-1] == str(newest)
    assert values(newest) == {4.0}
    out = tmp_path / "there" / "model"
    assert cli.main(["export", str(paths.root), "--step", "2", "--out", str(out)]) == 0
    assert values(out) == {2.0}
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.all(loaded.get_input_embeddings().weight == 2.0)
    assert AutoTokenizer.from_pretrained(out).decode([10]) == "7"
    assert cli.main(["export", str(paths.root)]) == 2
    assert f"{newest} exists. Remove it" in capsys.readouterr().err


def test_exported_reward_model_keeps_its_head(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "trainer.type=reward", head="value")
    assert cli.main(["export", str(paths.root), "--step", "4"]) == 0
    assert "score.weight" in load_file(paths.root / "export-step-000004" / "model.safetensors")


def test_run_of_a_version_with_other_options_is_exported(tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    paths.config.write_text(f"{paths.config.read_text()}unheard_of: 1\n")
    assert cli.main(["export", str(paths.root)]) == 0
    assert values(paths.root / "export-step-000004") == {4.0}


def test_missing_checkpoint_or_step_is_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(tmp_path)]) == 2
    assert f"no valid checkpoint in {tmp_path / 'checkpoints'}" in capsys.readouterr().err
    paths = make_run(tmp_path)
    assert cli.main(["export", str(paths.root), "--step", "3"]) == 2
    assert "of step 3 in" in (said := capsys.readouterr().err)
    assert "Steps with one: 2, 4." in said


@pytest.mark.parametrize("step", ["4", "step-4", "step-000004", "000004"])
def test_step_is_a_number_or_the_name_of_a_checkpoint(tmp_path: Path, step: str) -> None:
    paths = make_run(tmp_path)
    assert cli.main(["export", str(paths.root), "--step", step]) == 0
    assert values(paths.root / "export-step-000004") == {4.0}


@pytest.mark.parametrize("step", ["newest", "step-", "-4", "4_0", "step-4.0"])
def test_wrong_form_of_a_step_is_refused_with_the_form_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    assert cli.main(["export", str(tmp_path), f"--step={step}"]) == 2
    assert f"{step} is no step of a run. Write 40 or step-40." in capsys.readouterr().err
