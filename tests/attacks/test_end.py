"""The last module: the attacked run completes, and its files have no foreign data."""

from __future__ import annotations

import base64
import re
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from arealite.api.payloads import Payload
from arealite.api.trainer_messages import Ticket, TrainerStart, Waiting
from arealite.ext.audit.audit import audit
from arealite.system.ledger.ledger import connect
from tests.attacks.conftest import Live, stop
from tests.attacks.kinds import EMBEDDED, KIND
from tests.attacks.peers import MARKER, insider
from tests.e2e.conftest import LEARNING, SLOW_S
from tests.hostile import controls_in, foreign_controls_in
from tests.payloads import decode_segments

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(2 * SLOW_S)]


@pytest.mark.parametrize("words", ["top --once", "why", "audit"])
def test_commands_show_no_control_characters_of_a_live_run(live: Live, words: str) -> None:
    command, *options = words.split()
    said = live.command(command, str(live.paths.root), *options)
    assert "Traceback" not in said and len(said) > 20
    assert foreign_controls_in(said) == []


def test_attacked_run_continues_with_the_same_processes(live: Live) -> None:
    live.wait_for_steps(5)
    assert live.pids() == live.roles


def test_attacked_run_completes(live: Live) -> None:
    """A stray trainer waits to start at a step without a checkpoint."""
    with insider(live, "last-rank") as peer:
        start = TrainerStart(step=int(live.step()), world_size=1)
        peer.send_message(start)
        peer.send_message(msgspec.structs.replace(start, ticket=peer.receive(Ticket).number))
        peer.receive(Waiting)
    stop(live)
    assert live.process.returncode == 130, live.shown
    report = audit(live.paths.ledger)
    assert report.ok, report.table()
    assert report.steps >= live.step()


def test_resume_finds_the_checkpoint_and_the_secret(live: Live) -> None:
    """A resume ignores stray checkpoints."""
    before, secret = audit(live.paths.ledger).steps, live.secret
    more = [f"trainer.ppo.total_steps={before + 3}", "launcher.rollout_workers=2"]
    done = live.site.train(live.root, *LEARNING, *more, "launcher.trainer_ranks=2")
    assert done.code == 0, done.shown
    report = audit(live.paths.ledger)
    assert report.ok and report.steps == before + 3, report.table()
    assert live.secret == secret


def test_all_trajectories_are_from_the_runs_workers(live: Live) -> None:
    with closing(connect(live.paths.ledger, read_only=True)) as db:
        query = (
            "SELECT trajectory_id, reward, prompt_tokens, turns, header "
            "FROM trajectories JOIN payloads USING (trajectory_id)"
        )
        found = db.execute(query).fetchall()
    assert len(found) > 16
    for name, reward, prompt, turns, header in found:
        assert re.fullmatch(r"g\d+/[0-3]/agent", name)
        assert reward in (0.0, 1.0)
        assert b"owned" not in header
        for segment in decode_segments(Payload(prompt=prompt, turns=turns)):
            tokens = np.frombuffer(segment.tokens, "<i4")
            assert tokens[: len(MARKER)].tolist() != MARKER


def test_rewards_are_those_of_the_environment(live: Live) -> None:
    assert {*live.metrics("reward/max")} <= {0.0, 1.0}
    assert {*live.metrics("reward/min")} <= {0.0, 1.0}
    with closing(connect(live.paths.ledger, read_only=True)) as db:
        by_step = """SELECT g.step, AVG(t.reward), COUNT(*) FROM trajectories t
            JOIN groups g USING (group_id) WHERE g.step NOTNULL GROUP BY g.step"""
        steps = db.execute(by_step).fetchall()
    assert [step for step, _, _ in steps] == list(range(len(steps))), "no step is missing"
    assert all(0.0 <= mean <= 1.0 and size == 16 for _, mean, size in steps)


def test_no_group_is_filtered_because_of_an_attack(live: Live) -> None:
    """Groups were filtered only because attempts of the run failed."""
    with closing(connect(live.paths.ledger, read_only=True)) as db:
        reasons = {r for (r,) in db.execute("SELECT DISTINCT reason FROM groups") if r}
        unusable = [reason for reason in reasons if reason.startswith("unusable")]
    assert unusable == [], "what cannot be trained never reached the ledger"


def test_datapipe_counts_rejected_messages(live: Live) -> None:
    assert live.rejected() >= 0
    log = (live.paths.logs / "datapipe-0.log").read_text()
    assert "rejected_messages=" in log


def everything(live: Live) -> list[Path]:
    """List all files of the run and the server, reports included, without the name root."""
    files = [file for file in live.root.rglob("*") if file.is_file()]
    return files + [file for file in live.site.folder.glob("*") if file.is_file()]


def test_secret_is_in_no_file_of_the_run(live: Live) -> None:
    report = live.root / "report.html"
    live.command("report", str(live.paths.root), "--out", str(report))
    secret = live.secret
    keys = [secret.key, *(secret.derive(f"zmq {side}") for side in ("router", "dealer"))]
    keys += [secret.derive("http")]
    words = [form for key in keys for form in (key, key.hex().encode(), base64.b64encode(key))]
    files = everything(live)
    assert report in files and live.paths.ledger in files and live.paths.config in files
    for file in files:
        content = file.read_bytes()
        assert not [word for word in words if word in content], file
    vitals = [file for file in live.names.rglob("*") if file.is_file() and file.name != "secret"]
    assert not [file for file in vitals for word in words if word in file.read_bytes()]


def test_logs_have_no_control_characters(live: Live) -> None:
    texts = [live.shown, (live.site.folder / "server.log").read_text()]
    texts += [file.read_text() for file in live.paths.logs.glob("*.log")]
    for text in texts:
        assert foreign_controls_in(text) == []
    is_in_logs = any(r"\x1b]0;owned" in text for text in texts)
    assert is_in_logs or KIND is not EMBEDDED, "they are shown in another form"
    report = (live.root / "report.html").read_text()
    assert controls_in(report) == []


@pytest.mark.parametrize("words", ["top --once", "why", "audit"])
def test_commands_show_no_control_characters_of_a_run_that_ended(live: Live, words: str) -> None:
    command, *options = words.split()
    said = live.command(command, str(live.paths.root), *options)
    assert foreign_controls_in(said) == []
