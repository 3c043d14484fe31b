"""A run with real processes, its own server and two environments.

One environment reads rows. The other is a plugin of two seats that makes its rows and runs in
processes that are renewed. All tests use one run, because a start takes long.
"""

from __future__ import annotations

import pytest

from arealite.ext.audit.audit import audit
from tests.e2e.conftest import ROOT, Finished, Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mixed(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    key, root = "trainer.ppo.collector.envs", tmp_path_factory.mktemp("mixed")
    done = site.train(
        root,
        f"cluster.name_root={root / 'names'}",
        "launcher.llm_servers=1",
        "launcher.server_args=[llm_server.embedded.max_running_requests=16]",
        "imports=[tests.e2e.countdown]",
        "dataset.train=''",
        "dataset.eval=null",
        "dataset.rows=32",
        "dataset.eval_rows=4",
        f"{key}.sums.env.type=math",
        f"{key}.sums.train={site.folder / 'train.jsonl'}",
        f"{key}.sums.eval={site.folder / 'eval.jsonl'}",
        f"{key}.letters.env.type=countdown",
        f"{key}.letters.env.countdown.pause_s=0.001",
        f"{key}.letters.env.runtime.type=subprocess",
        f"{key}.letters.env.runtime.processes=2",
        f"{key}.letters.env.runtime.recycle_episodes=24",
        f"{key}.letters.weight=3",
        f"{key}.letters.eval=generated",
        "trainer.ppo.total_steps=6",
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.code == 0, done.shown + done.logs()
    report = audit(done.paths.ledger)
    assert report.ok and report.steps == 6, report.table()
    return done


def test_two_environments_are_trained_and_evaluated(mixed: Finished) -> None:
    lines = mixed.metrics()
    trained = [line for line in lines if "reward/mean" in line]
    assert len(trained) == 6
    sources = {"sums": 0.0, "letters": 0.0}
    for line in trained:
        told = {name: line.get(f"episode/{name}/trajectories", 0.0) for name in sources}
        assert sum(told.values()) == line["episode/trajectories"]
        for name, count in told.items():
            assert (f"reward/{name}/mean" in line) == (count > 0)
            sources[name] += count
        assert ("reward/seat/caller/mean" in line) == (told["letters"] > 0)
    assert 0 < sources["sums"] < sources["letters"], "one to three"
    (first, *_, last) = [line for line in lines if "eval/reward" in line]
    for line in (first, last):
        assert line["eval/num_prompts"] == 8 + 4
        assert {"eval/reward/sums", "eval/reward/letters"} <= line.keys()


def test_environment_processes_are_recycled_and_none_dies(mixed: Finished) -> None:
    logs = mixed.logs()
    assert logs.count("environment process ready") > 2
    assert "environment process recycled" in logs
    assert "environment process died" not in logs


def test_run_starts_and_stops_its_own_server(mixed: Finished) -> None:
    assert "waiting up to" not in mixed.shown
    assert "server ready" in (mixed.paths.logs / "llm_server-0.log").read_text()
    names = mixed.paths.root.parents[1] / "names"
    assert names.exists()
    assert not list(names.rglob("llm_server/*.json")), "a server left its name"
