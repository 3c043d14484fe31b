"""Checks of a run with several environments or seats before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.cli.configs import load
from arealite.cli.preflight import check_options, check_sources
from tests.impl.rollout import worlds  # registers the environments

TWO = "collector.envs.a.env.type=math collector.envs.b.env.type=duel"


def configured(folder: Path, options: str) -> ExperimentConfig:
    (folder / "empty.yaml").write_text("")
    roots = ("dataset.", "launcher.")
    words = [w if w.startswith(roots) else f"trainer.ppo.{w}" for w in options.split()]
    return load(ExperimentConfig, folder / "empty.yaml", words)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (f"{TWO} collector.envs.a/b.env.type=math", "collector.envs.a/b: use letters"),
        (
            f"{TWO} collector.envs.a.weight=0.01 dataset.rows=9",
            "envs.a.weight=0.01 is less than one",
        ),
        (f"{TWO} collector.envs.b.seats.thrid.type=judge", "duel: Unknown seat 'thrid'"),
        ("collector.env.type=duel collector.seats.agent.type=judge", "duel: Unknown seat 'agent'"),
        ("collector.autoscale.enabled=true collector.concurrency=4", "min_concurrency=8 is above"),
        ("launcher.max_workers=4", "max_workers=4 must be at least"),
        (
            "collector.autoscale.enabled=true launcher.rollout_workers=3 launcher.max_workers=2",
            "launcher.rollout_workers=3, and needs",
        ),
        (f"{TWO} collector.envs.c.env.type=mth", "Unknown env type 'mth'. Did you mean 'math'"),
        (
            "collector.env.type=tools collector.env.tools.tools=[calculater]",
            "Unknown tool type 'calculater'. Did you mean 'calculator'",
        ),
        (
            "collector.env.math.reward.type=exact",
            "Unknown reward type 'exact'. Did you mean 'exact_match'",
        ),
        ("collector.env.runtime.type=remote", "needs env.runtime.addresses"),
        (
            "collector.env.runtime.type=remote collector.env.runtime.addresses=[nowhere]",
            "host:port",
        ),
        (f"{TWO} collector.envs.b.seats.first.type=jdge", "Unknown agent type 'jdge'"),
    ],
)
def test_invalid_environment_and_seat_options_are_refused(
    tmp_path: Path, options: str, says: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_options(configured(tmp_path, options))
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        f"{TWO} collector.envs.b.seats.second.type=judge",
        "collector.env.type=math",
        "collector.env.type=tools collector.env.tools.mcp.x.command=[true] "
        "collector.env.tools.mcp.x.env.A=b",
        "collector.autoscale.enabled=true launcher.max_workers=4",
    ],
)
def test_valid_environment_and_seat_options_are_accepted(tmp_path: Path, options: str) -> None:
    assert worlds is not None
    check_options(configured(tmp_path, options))


def test_dataset_train_is_refused_with_several_environments(tmp_path: Path) -> None:
    check_sources(configured(tmp_path, TWO))
    with pytest.raises(UserError, match=r"collector.envs.NAME.train=…"):
        check_sources(configured(tmp_path, f"{TWO} dataset.train=x.jsonl"))
