"""A run with a mixture of experts: its server reports experts, the ledger stores them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from arealite.ext.audit.audit import audit
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Finished, Site
from tests.models import tiny_mixture

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

REWARD = '''
from arealite.api.reward import Reward, rewards


@rewards.register("variety")
class Variety(Reward):
    """Reward by the number of different characters, so that most groups are trained."""

    async def score(self, completion: str, ground_truth: str) -> float:
        return len(set(completion)) + sum(map(ord, completion)) % 101 / 101
'''


def train(site: Site, root: Path, model: Path, *, routing: str) -> Finished:
    """Train three steps; server and trainer compute in bfloat16."""
    root.mkdir()
    (root / "variety.py").write_text(REWARD)
    done = site.train(
        root,
        "imports=[variety]",
        "trainer.ppo.collector.env.math.reward.type=variety",
        "dataset.eval=null",
        f"cluster.name_root={root / 'names'}",
        f"model.path={model}",
        "model.dtype=bfloat16",
        "launcher.llm_servers=1",
        "trainer.ppo.engine.fsdp.dtype=bfloat16",
        f"trainer.ppo.collector.routing={routing}",
        "trainer.ppo.total_steps=3",
        "trainer.ppo.publisher.self_check=false",  # near ties, routers differ in bfloat16
    )
    assert done.code == 0, done.shown + done.logs()
    report = audit(done.paths.ledger)
    assert report.ok and report.steps == 3, report.table()
    return done


def test_replayed_routing_makes_a_run_repeatable_and_its_mismatch_smaller(
    site: Site, tmp_path: Path
) -> None:
    sizes = {"num_experts": 16, "moe_intermediate_size": 64}
    model = tiny_mixture(tmp_path / "model", "qwen3_moe", num_hidden_layers=4, **sizes)
    runs = {
        name: train(site, tmp_path / name, model, routing=name) for name in ("replay", "measure")
    }
    means = dict[str, float]()
    for name, done in runs.items():
        lines = [line for line in done.metrics() if "reward/mean" in line]
        means[name] = fmean(line["mismatch/logprob_abs_diff_mean"] for line in lines)
        assert all(0.9 < line["routing/agreement"] <= 1.0 for line in lines)
    assert means["replay"] < means["measure"], means
    words = [sys.executable, "-m", "arealite.cli.main", "replay", str(runs["replay"].paths.root)]
    options: dict[str, Any] = {"cwd": tmp_path / "replay", "timeout": SLOW_S, "env": ENVIRONMENT}
    again = subprocess.run(words, capture_output=True, text=True, **options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "bitwise equal" in again.stdout
