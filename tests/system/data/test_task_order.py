"""The tasks are a permutation in each epoch, unless an installed sampler takes the run."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from arealite.api.experiment_config import DatasetConfig, ExperimentConfig
from arealite.api.task import Task
from arealite.base import entries
from arealite.system.data.dataset import Permutation, make_sampler
from tests.system.scenes import tasks

CONFIG = ExperimentConfig(seed=3)


def test_each_epoch_has_each_row_once_in_an_order_of_its_own() -> None:
    sampler = make_sampler(CONFIG, tasks(20))
    draws = [sampler.draw(seq) for seq in range(40)]
    epochs = [[row for epoch, row in draws if epoch == number] for number in range(2)]
    assert [sorted(rows) for rows in epochs] == [[*range(20)]] * 2
    assert epochs[0] != epochs[1]
    assert [sampler.draw(seq) for seq in range(40)] == draws, "a draw depends on its number only"
    assert sampler.metrics() == {}


def test_rows_keep_their_order_without_shuffle() -> None:
    sampler = make_sampler(replace(CONFIG, dataset=DatasetConfig(shuffle=False)), tasks(3))
    assert [sampler.draw(seq) for seq in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_first_installed_sampler_that_takes_the_run_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = Permutation(2, seed=0, shuffle=False)

    def refuses(config: ExperimentConfig, train: Sequence[Task]) -> None:
        assert config is CONFIG
        assert len(train) == 4

    makers = {"task_sampler": [refuses, lambda config, train: chosen]}
    monkeypatch.setattr(entries, "hooks", makers.__getitem__)
    assert make_sampler(CONFIG, tasks(4)) is chosen
