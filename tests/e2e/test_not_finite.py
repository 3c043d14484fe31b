"""A run whose updates are not finite ends by itself, with an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Site
from tests.e2e.test_offline import write_answers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

REWARD = """
from itertools import count

from arealite.api.reward import Reward, rewards

CALLS = count()


@rewards.register("counted")
class Counted(Reward):
    async def score(self, completion, ground_truth):
        return float(next(CALLS) % 5)
"""
"""Answers of a group have different rewards, so each update has a gradient."""
SAYS = "updates in a row were skipped, after 1 applied ones: the gradient norm is "


def test_non_finite_updates_stop_the_run(site: Site, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(REWARD)
    done = site.train(
        tmp_path,
        *("imports=[counted]", "trainer.ppo.collector.env.math.reward.type=counted"),
        *("trainer.ppo.lr=1e9", "trainer.ppo.optimizer.warmup_steps=0", "dataset.eval=null"),
        *("trainer.ppo.optimizer.max_skipped_updates=2", "trainer.ppo.total_steps=40"),
        # All updates in the first step: a server with the broken weights fails its episodes, and
        # too many failures end the run, too.
        "trainer.ppo.epochs=3",
        # Its own server: the shared one would serve the broken weights to later tests.
        *("launcher.llm_servers=1", f"cluster.name_root={tmp_path / 'names'}"),
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert done.code == 3, done.shown + done.logs()
    assert "2 " + SAYS in done.shown and "the learning rate (1e+09) is too high" in done.shown
    assert "started again" not in done.shown
    assert len(done.metrics()) < 40


def test_non_finite_updates_stop_an_offline_run(site: Site, tmp_path: Path) -> None:
    write_answers(tmp_path / "answers.jsonl", 48)
    done = site.train(
        tmp_path / "run",
        *("--config", str(ROOT / "config/sft.yaml")),
        *(f"dataset.train={tmp_path / 'answers.jsonl'}", "dataset.eval=null"),
        *("trainer.offline.lr=1e9", "trainer.offline.batch_size=4"),
        "trainer.offline.optimizer.warmup_steps=0",
    )
    assert done.code == 3, done.shown + done.logs()
    assert "5 " + SAYS in done.shown
    assert "started again" not in done.shown
