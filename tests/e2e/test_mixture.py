"""Two environments in one run, as real processes: one makes its rows, one reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.system.audit import audit
from tests.e2e.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_two_environments_are_trained_and_evaluated_side_by_side(
    site: Site, tmp_path: Path
) -> None:
    key = "trainer.ppo.collector.envs"
    done = site.train(
        tmp_path,
        "imports=[tests.e2e.countdown]",
        "dataset.train=''",
        "dataset.eval=null",
        "dataset.rows=32",
        "dataset.eval_rows=4",
        f"{key}.sums.env.type=math",
        f"{key}.sums.train={site.folder / 'train.jsonl'}",
        f"{key}.sums.eval={site.folder / 'eval.jsonl'}",
        f"{key}.letters.env.type=countdown",
        f"{key}.letters.weight=3",
        f"{key}.letters.eval=generated",
        "trainer.ppo.total_steps=6",
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.code == 0, done.shown + done.logs()
    lines = done.metrics()
    trained = [line for line in lines if "reward/mean" in line]
    sources = {
        name: sum(f"reward/{name}/mean" in line for line in trained) for name in ("sums", "letters")
    }
    assert 0 < sources["sums"] < sources["letters"] == len(trained) == 6
    for line in trained:
        told = [line.get(f"episode/{name}/trajectories", 0.0) for name in sources]
        assert sum(told) == line["episode/trajectories"]
    assert any("reward/seat/caller/mean" in line for line in trained)
    (first, *_, last) = [line for line in lines if "eval/accuracy" in line]
    for line in (first, last):
        assert line["eval/num_prompts"] == 8 + 4
        assert {"eval/accuracy/sums", "eval/accuracy/letters"} <= line.keys()
    assert audit(done.paths.ledger).ok
