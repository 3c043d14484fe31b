"""One command for the whole run: train.py starts its servers, too, and ends them."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.system.audit import audit
from tests.e2e.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def test_a_run_starts_and_ends_its_own_servers(site: Site, tmp_path: Path) -> None:
    names = tmp_path / "names"
    done = site.train(
        tmp_path,
        f"cluster.name_root={names}",
        "launcher.llm_servers=1",
        "launcher.server_args=[llm_server.embedded.max_running_requests=16]",
        "trainer.ppo.total_steps=2",
    )
    assert done.code == 0, done.shown + done.logs()
    assert "waiting up to" not in done.shown
    report = audit(done.paths.ledger)
    assert report.ok and report.steps == 2, report.table()
    assert "server ready" in (done.paths.logs / "llm_server-0.log").read_text()
    assert not list(names.rglob("llm_server/*.json")), "a server left its name"
