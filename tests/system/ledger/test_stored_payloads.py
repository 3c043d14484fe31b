"""The ledger stores the prompt of a group once, and returns every payload as it was."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from arealite.api.payloads import encode_segments
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.ext.audit.audit import audit
from arealite.system.ledger.ledger import Ledger, connect, read_payloads
from arealite.system.ledger.payload_checks import REFERENCE
from tests.system.ledger.small_run import Shape, make_run
from tests.system.scenes import header

PROMPT, ANSWER, MEMBERS = 1000, 10, 8


def made(seed: int, *, prompt: int = 0) -> bytes:
    """Make a payload with an own answer to a prompt."""
    rng, size = np.random.default_rng(seed), PROMPT + ANSWER
    tokens = np.concatenate([np.arange(PROMPT) + prompt, rng.integers(0, 9, ANSWER)])
    mask = np.arange(size) >= PROMPT
    zeros = np.zeros(size, "<f4").tobytes()
    versions = np.where(mask, 0, -1).astype("<i4").tobytes()
    raw = tokens.astype("<i4").tobytes()
    return encode_segments(
        [
            Segment(
                tokens=raw,
                loss_mask=mask.tobytes(),
                logprobs=zeros,
                versions=versions,
                rewards=zeros,
                temperature=1.0,
            )
        ]
    )


def store(ledger: Ledger, payloads: dict[str, bytes]) -> None:
    """Store payloads by the ids of their trajectories."""
    for name, payload in payloads.items():
        group, member, seat = name.split("/")
        told: TrajectoryHeader = header(group, int(member), seat=seat)
        ledger.add_trajectory(told, payload)
    ledger.commit()


def stored(path: Path) -> dict[str, bytes]:
    """Return the payloads as they are in the file."""
    with closing(connect(path, read_only=True)) as db:
        return dict(db.execute("SELECT trajectory_id, payload FROM trajectories").fetchall())


def test_prompt_of_a_group_is_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    given = {f"g0/{member}/agent": made(member) for member in range(MEMBERS)}
    for part in ("g0/0", "g0/[1-3]", "g0/[4-7]"):  # a datapipe that is started again in between
        with closing(Ledger(path, fingerprint={})) as ledger:
            names = [name for name in given if Path(name).match(f"{part}/agent")]
            store(ledger, {name: given[name] for name in names})
    assert read_payloads(path, [*given]) == [*given.values()]
    sizes = [len(payload) for payload in stored(path).values()]
    assert sum(size > 4 * PROMPT for size in sizes) == 3, "once for each start"
    assert sum(sizes) < 3 * 4 * PROMPT + MEMBERS * 500


def test_other_prompts_seats_and_groups_keep_their_own_prompt(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    given = {
        "g0/0/agent": made(0),
        "g0/1/agent": made(1, prompt=5),  # an environment drew another prompt
        "g0/2/agent": made(2),
        "g0/3/agent": made(6, prompt=5),
        "g0/4/agent": msgspec.msgpack.encode([]),  # of an older version
        "g0/0/judge": made(3, prompt=7),
        "g0/1/judge": made(4, prompt=7),
        "g1/0/agent": made(5),
    }
    with closing(Ledger(path, fingerprint={})) as ledger:
        store(ledger, given)
    assert read_payloads(path, [*given]) == [*given.values()]
    referring = {name for name, payload in stored(path).items() if payload[:1] == REFERENCE}
    assert referring == {"g0/2/agent", "g0/3/agent", "g0/1/judge"}


@pytest.mark.parametrize("change", ["payload = NULL", "payload = X'c1ff'", "trajectory_id = 'x'"])
def test_audit_names_the_payloads_whose_prompt_was_damaged(tmp_path: Path, change: str) -> None:
    ledger = make_run(tmp_path / "run", Shape(steps=2))
    referring = {name for name, payload in stored(ledger).items() if payload[:1] == REFERENCE}
    assert referring
    name = min(referring)
    first, _ = msgspec.msgpack.decode(stored(ledger)[name][1:])
    with closing(sqlite3.connect(ledger)) as db, db:
        sql = f"UPDATE trajectories SET {change} WHERE trajectory_id = ?"
        assert db.execute(sql, (first,)).rowcount == 1
    report = audit(ledger)
    assert not report.ok
    assert name in report.table()
