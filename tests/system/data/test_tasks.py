"""The tasks of a run are generated, read or mixed by weight; each process builds the same list."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.agent import Agent
from arealite.api.collector_config import CollectorConfig, PartConfig
from arealite.api.env import Env, EnvConfig, envs
from arealite.api.experiment_config import DatasetConfig, ExperimentConfig
from arealite.api.reward import RewardConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.math.config import MathEnvConfig
from arealite.ext.rewards.config import FunctionRewardConfig
from arealite.system.data.tasks import check_first_rows, load_split, reads_columns, shares
from tests.system.data.test_dataset import jsonl


@envs.register("sums")
class Sums(Env):
    """Generates rows that contain their number."""

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int):
        return ({"prompt": f"{split} {seed} {n}", "extra_info": {"level": n % 3}} for n in count())

    async def run(self, task: Task, **agents: Agent) -> None: ...


@envs.register("mute")
class Mute(Env):
    """Generates no rows."""

    async def run(self, task: Task, **agents: Agent) -> None: ...


@envs.register("torn")
class Torn(Mute):
    """Generates an invalid row."""

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int):
        yield {"prompt": "fine"}
        yield {"question": "not so"}


SUMS = PartConfig(env=EnvConfig(type="sums"))


def configured(*, parts: dict[str, PartConfig] | None = None, env: str = "sums", **dataset: Any):
    collector = CollectorConfig(env=EnvConfig(type=env), envs=parts or {})
    config = ExperimentConfig(dataset=DatasetConfig(**dataset), seed=7)
    ppo = replace(config.trainer.ppo, collector=collector)
    return replace(config, trainer=replace(config.trainer, ppo=ppo))


@given(
    st.dictionaries(st.text(max_size=3), st.floats(0.01, 100), min_size=1, max_size=8),
    st.integers(0, 10_000),
)
def test_shares_add_up_and_are_off_by_less_than_one(weights: dict[str, float], rows: int) -> None:
    got, total = shares(weights, rows), sum(weights.values())
    assert list(got) == list(weights)
    assert sum(got.values()) == rows
    assert all(abs(got[name] - rows * w / total) < 1 + 1e-6 for name, w in weights.items())


def test_environment_generates_different_rows_for_train_and_eval() -> None:
    config = configured(train="generated", eval="generated", rows=5, eval_rows=2)
    train, held_out = load_split(config, "train"), load_split(config, "eval")
    assert [task.prompt for task in train] == [f"train 7 {n}" for n in range(5)]
    assert [(task.task_id, task.prompt) for task in held_out] == [
        ("eval-0", "eval 7 0"),
        ("eval-1", "eval 7 1"),
    ]
    assert load_split(config, "train") == train
    assert load_split(configured(train="generated"), "eval") == []


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ("mute", "Mute generates no tasks. Set dataset.train and dataset.eval to files."),
        ("torn", "row 1 made by environment torn: no column `prompt`, only question"),
    ],
)
def test_unavailable_rows_are_refused(env: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_split(configured(env=env, train="generated"), "train")


def test_mixture_is_divided_by_weight_and_each_task_has_its_environment(
    tmp_path: Path,
) -> None:
    file = jsonl(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    parts = {
        "made": replace(SUMS, weight=3.0),
        "read": PartConfig(env=EnvConfig(type="mute"), train=file),
    }
    config = configured(parts=parts, rows=12)
    tasks = load_split(config, "train")
    assert Counter(task.source for task in tasks) == {"made": 9, "read": 3}
    assert [task.task_id for task in tasks] == [f"train-{n}" for n in range(12)]
    assert [task.prompt for task in tasks if task.source == "read"] == ["a", "b", "a"]
    assert tasks[0].extra_info == {"level": 0, "env": "made"}
    assert load_split(config, "train") == tasks


def test_only_parts_with_held_out_rows_are_evaluated(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    parts = {
        "made": replace(SUMS, eval="generated"),
        "read": replace(SUMS, eval=file),
        "none": SUMS,
    }
    held_out = load_split(configured(parts=parts, eval_rows=2), "eval")
    assert Counter(task.source for task in held_out) == {"made": 2, "read": 3}
    assert [task.task_id for task in held_out] == [f"eval-{n}" for n in range(5)]


def test_task_without_an_environment_has_the_source_of_its_row() -> None:
    assert (
        Task(
            task_id="t", prompt="p", ground_truth=None, extra_info={"data_source": "openai/gsm8k"}
        ).source
        == "openai/gsm8k"
    )
    assert (
        Task(
            task_id="t", prompt="p", ground_truth=None, extra_info={"data_source": "x", "env": "y"}
        ).source
        == "y"
    )
    assert Task(task_id="t", prompt="p", ground_truth=None, extra_info={}).source == ""


def rated(completion: str, difficulty: float) -> float:
    return difficulty


def test_columns_are_kept_for_the_parts_whose_reward_reads_them(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"question": "a", "answer": "#### 1", "difficulty": 3}])
    function = FunctionRewardConfig(paths=[f"{__name__}:rated"])
    reward = RewardConfig(type="function", function=function)
    columns = {"ground_truth": "difficulty"}
    parts = {
        "rated": PartConfig(env=EnvConfig(math=MathEnvConfig(reward=reward)), train=file),
        "math": PartConfig(env=EnvConfig(), train=file, columns=columns),
    }
    config = configured(parts=parts, rows=2)
    check_first_rows(config)
    first, second = load_split(config, "train")
    assert first.columns == {"question": "a", "answer": "#### 1", "difficulty": 3}
    assert (first.ground_truth, second.ground_truth, second.columns) == ("1", "3", {})


@dataclass(frozen=True, kw_only=True)
class SimilarConfig:
    """Options of another package with the names of some of ours, and other meanings."""

    reward_from: str = "file"
    reads_columns: bool = True
    check_task: bool = False
    reward: RewardConfig = field(default_factory=RewardConfig)


@envs.register("similar")
class Similar(Mute):
    """An environment of another package."""


def test_options_of_other_packages_with_names_of_ours_have_no_meaning(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"prompt": "a", "ground_truth": "", "difficulty": 3}])

    class Grown(EnvConfig):
        similar = SimilarConfig()

    env = Grown(type="similar")
    assert not reads_columns(env)
    with pytest.raises(UserError, match="no answer can be compared with ground_truth"):
        check_first_rows(configured(parts={"a": PartConfig(env=env, train=file)}, rows=1))
