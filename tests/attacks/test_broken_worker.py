"""A worker with a bug that garbles a tenth of its results, in a separate run.

A test also pauses the server, which the trainer is configured not to continue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from urllib.request import Request, urlopen

import pytest

from arealite.api.payloads import Payload
from arealite.ext.audit.audit import audit
from arealite.system.ledger.ledger import connect
from tests.attacks import garbling
from tests.attacks.conftest import Live, start, stop
from tests.attacks.kinds import KIND
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site
from tests.payloads import decode_segments
from tests.waiting import until

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(2 * SLOW_S)]

STEPS = 100


@pytest.fixture(scope="module")
def run(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("garbled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "GARBLED", str(root / "garbled.jsonl"))
        made = start(
            site,
            root,
            f"imports=[{garbling.FILE}]",
            f"trainer.ppo.total_steps={STEPS}",
            "trainer.ppo.publisher.continue_paused=false",
            "launcher.rollout_workers=2",
        )
    try:
        yield made
    finally:
        stop(made)


def test_why_reports_a_server_paused_by_another_client(run: Live) -> None:
    """A publish ends a pause, too, so pause until the trainer has no batch left."""

    def post(path: str) -> None:
        headers = run.ours | {"Content-Type": "application/json"}
        request = Request(run.server + path, b"{}", headers, method="POST")
        urlopen(request, timeout=SLOW_S).close()

    def is_paused_for_long() -> bool:
        paused_s = run.read(KIND.version)["paused_s"]
        if paused_s is None:
            post("/pause_generation")
        return (paused_s or 0.0) > 3.0

    until(is_paused_for_long, what="a pause that stays", seconds=SLOW_S)
    said = lambda: run.command("why", str(run.paths.root))  # noqa: E731
    is_named = lambda: re.search("llm_server.*paused", said())  # noqa: E731
    until(is_named, what=said, seconds=SLOW_S)
    assert run.is_alive()
    post("/continue_generation")
    run.wait_for_steps()


def test_run_with_a_worker_that_garbles_results_completes(run: Live) -> None:
    assert run.process.wait(SLOW_S) == 0, run.shown
    report = audit(run.paths.ledger)
    assert report.ok and report.steps == STEPS, report.table()


def garbled(run: Live) -> list[dict[str, str | int]]:
    lines = (run.root / "garbled.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_garbled_result_is_counted(run: Live) -> None:
    """A result that is resent after a slow acknowledgement is counted again."""
    made = garbled(run)
    assert len({line["what"] for line in made}) > 5, "most bugs were seen"
    log = (run.paths.logs / "datapipe-0.log").read_text()
    (end,) = [line for line in log.splitlines() if "datapipe ends" in line]
    counted = int(end.split("rejected_messages=")[1].split()[0])
    cut = [line for line in made if not line["lease"]]
    assert len(made) - len(cut) <= counted, "episodes in a message that was cut off come with it"
    sent = {(line["lease"], line["member"]) for line in made}
    with closing(connect(run.paths.ledger, read_only=True)) as db:
        failed = db.execute("SELECT lease_id, member FROM failures WHERE class = 'rejected'")
        assert {*failed} <= sent, "no result of an honest worker is rejected"


def test_nothing_garbled_is_in_the_ledger(run: Live) -> None:
    wrong = {line["sha"] for line in garbled(run)}
    with closing(connect(run.paths.ledger, read_only=True)) as db:
        query = (
            "SELECT prompt_tokens, turns, reward "
            "FROM trajectories JOIN payloads USING (trajectory_id)"
        )
        rows = db.execute(query).fetchall()
    assert len(rows) >= 16 * STEPS
    for prompt, turns, reward in rows:
        assert sha256(prompt + turns).hexdigest() not in wrong
        assert 0.0 <= reward <= 1.0
        for segment in decode_segments(Payload(prompt=prompt, turns=turns)):
            assert segment.tokens != garbling.MARK * len(segment.loss_mask)


def test_log_names_the_worker_once(run: Live) -> None:
    log = (run.paths.logs / "datapipe-0.log").read_text()
    named = [line for line in log.splitlines() if "message rejected" in line]
    assert [line for line in named if "sender=rollout-0@" in line]
    assert not [line for line in named if "sender=rollout-1@" in line]
    assert len([line for line in named if "sender=rollout-0@" in line]) == 1
