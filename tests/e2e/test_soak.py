"""33 verified kills of all roles at random instants; then the ledger must balance."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from tests.e2e.conftest import ENVIRONMENT, ROOT, Site, all_gone
from tools import soak

pytestmark = [pytest.mark.processes, pytest.mark.faults, pytest.mark.timeout(1800)]

PLAN = ["datapipe", "rollout"] * 10 + ["llm_server"] * 5 + ["trainer"] * 3
PLAN += ["launcher"] * 2 + ["warm_parent"] * 3
KILLS = len(PLAN)


def test_thirty_kills_leave_the_ledger_balanced(site: Site, tmp_path: Path) -> None:
    names = [
        "experiment_name=e2e",
        "trial_name=soak",
        f"cluster.name_root={tmp_path / 'names'}",
        f"model.path={site.model}",
    ]
    command = site.command(tmp_path, "trainer.ppo.total_steps=100000", *names, *soak.OVERRIDES)
    script = str(ROOT / "arealite" / "launch_llm_server.py")
    place = soak.Site(
        [sys.executable, script, *names, *soak.SERVER], command, tmp_path, ENVIRONMENT
    )
    plan = random.Random(30).sample(PLAN, KILLS)
    killer = soak.Killer(place, seed="30", mean_s=0.6, plan=plan)
    paths = RunPaths(tmp_path / "e2e" / "soak")
    seen: list[int] = []

    def trains_again() -> bool:
        """Return whether a step was trained since the first call."""
        text = paths.metrics.read_text() if paths.metrics.exists() else ""
        seen.append(text.count('"reward/mean"'))
        return seen[-1] > min(seen)

    place.start()
    try:
        code = killer.run(limit=KILLS, timeout_s=1500.0, stop_when=trains_again)
    finally:
        place.stop()
    shown = (tmp_path / "train.log").read_text() + (tmp_path / "server.log").read_text()
    assert code == 130, shown
    assert len(killer.verified) >= KILLS
    assert all(kill.back_s is not None for kill in killer.kills), "a role has not come back"
    kinds = Counter(kill.role.split("-")[0] for kill in killer.verified)
    assert set(kinds) == set(soak.WEIGHTS), f"some role was never killed: {kinds}"
    report = audit(paths.ledger)
    assert report.ok, report.table()
    assert report.steps > 0, "it trained in spite of all this"
    all_gone(tmp_path)
