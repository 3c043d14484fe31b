"""The ledger stores the prompt of a group once, and returns every payload as it was."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from arealite.api.payloads import Payload
from arealite.ext.audit.audit import audit
from arealite.system.ledger.ledger import Ledger, connect, read_payloads
from tests.system.ledger.small_run import Shape, make_run
from tests.system.scenes import header

PROMPT, MEMBERS = 1000, 8


def made(seed: int, *, prompt: int = 0) -> Payload:
    """Make a payload with turns of its own after a prompt."""
    ids = np.arange(PROMPT, dtype="<i4") + prompt
    return Payload(prompt=ids.tobytes(), turns=b"turns %d" % seed)


def store(ledger: Ledger, payloads: dict[str, Payload]) -> None:
    """Store payloads by the ids of their trajectories."""
    for name, payload in payloads.items():
        group, member, seat = name.split("/")
        ledger.add_trajectory(header(group, int(member), seat=seat), payload)
    ledger.commit()


def stored_prompts(path: Path) -> list[tuple[str, bytes]]:
    """Return group and tokens of the prompts in the file."""
    with closing(connect(path, read_only=True)) as db:
        return db.execute("SELECT group_id, tokens FROM prompts").fetchall()


def test_prompt_of_a_group_is_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    given = {f"g0/{member}/agent": made(member) for member in range(MEMBERS)}
    for part in ("g0/0", "g0/[1-3]", "g0/[4-7]"):  # a datapipe that is started again in between
        with closing(Ledger(path, fingerprint={})) as ledger:
            names = [name for name in given if Path(name).match(f"{part}/agent")]
            store(ledger, {name: given[name] for name in names})
    assert read_payloads(path, [*given]) == [*given.values()]
    assert stored_prompts(path) == [("g0", made(0).prompt)]


def test_other_prompts_and_groups_keep_their_own_prompt(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    given = {
        "g0/0/agent": made(0),
        "g0/1/agent": made(1, prompt=5),  # an environment drew another prompt
        "g0/2/agent": made(2),
        "g0/3/agent": made(6, prompt=5),
        "g0/4/agent": Payload(prompt=b"", turns=b"no prompt"),
        "g0/0/judge": made(3),
        "g0/1/judge": made(4, prompt=7),
        "g1/0/agent": made(5),
    }
    with closing(Ledger(path, fingerprint={})) as ledger:
        store(ledger, given)
    assert read_payloads(path, [*given]) == [*given.values()]
    expected = [("g0", made(0, prompt=prompt).prompt) for prompt in (0, 5, 7)]
    assert sorted(stored_prompts(path)) == sorted([*expected, ("g0", b""), ("g1", made(5).prompt)])


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE prompts SET tokens = X'0000' WHERE group_id = ?",
        "DELETE FROM prompts WHERE group_id = ?",
        "UPDATE prompts SET digest = X'00' WHERE group_id = ?",
        "UPDATE prompts SET tokens = 'text' WHERE group_id = ?",
        "UPDATE trajectories SET prompt = X'00' WHERE group_id = ?",
    ],
)
def test_audit_names_the_trajectories_whose_prompt_was_damaged(tmp_path: Path, change: str) -> None:
    ledger = make_run(tmp_path / "run", Shape(steps=2))
    with closing(sqlite3.connect(ledger)) as db, db:
        assert db.execute(change, ("g0",)).rowcount > 0
    report = audit(ledger)
    assert not report.ok
    assert "g0/0/agent, g0/1/agent" in report.table()
    assert "g1/" not in report.table()
