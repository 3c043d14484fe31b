"""The audit recomputes the digests of turns: prompts as sent, answers as they arrived."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from arealite.api.payloads import Payload
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.ext.audit.audit import audit
from arealite.ext.audit.audit_report import AuditReport
from arealite.system.ledger.payload_checks import find_mismatch
from tests.ext.view.runs import branched_header, branched_session, make_run
from tests.payloads import change_turn, pack

Tamper = Callable[[Payload], Payload]
INTACT = branched_session()
"""Prompts of 2, 5, 3 and 8 tokens; the third one is a branch, and each answer has two tokens."""
NODES = TrajectoryTree.decode(INTACT).turns


def audited(root: Path, payload: Payload) -> AuditReport:
    """Write a ledger whose first trajectory is intact, with right checksums; audit it."""
    rows = [
        (0, branched_header(INTACT, member), content)
        for member, content in enumerate([INTACT, payload])
    ]
    return audit(make_run(root, rows).ledger)


def first_of(turn: int, name: str, kind: str, value: float) -> Tamper:
    """Return a change of the first value in one array of a turn."""
    array = np.frombuffer(getattr(NODES[turn], name), kind).copy()
    array[0] = value
    return field(turn, **{name: array.tobytes()})


def field(turn: int, **fields: Any) -> Tamper:
    """Return a change of the fields of a turn."""
    return lambda payload: change_turn(payload, turn, **fields)


def prompt_token(payload: Payload) -> Payload:
    return replace(payload, prompt=payload.prompt[:4] + b"\x09\0\0\0")


def without_digests(payload: Payload) -> Payload:
    """Return a payload as an older AReaLite wrote it."""
    for turn in range(len(NODES)):
        payload = change_turn(payload, turn, prompt_digest=b"", answer_digest=b"")
    return payload


def swapped(payload: Payload) -> Payload:
    """Give two turns each other's answer digest."""
    payload = change_turn(payload, 0, answer_digest=NODES[1].prompt_digest)
    return change_turn(payload, 1, answer_digest=NODES[0].prompt_digest)


TAMPERED: dict[str, tuple[Tamper, str]] = {
    "a token of the prompt": (prompt_token, "receipt: prompt of 3 tokens"),
    "a sampled token": (first_of(0, "ids", "<i4", 9), "receipt: answer after 2 tokens"),
    "an observed token": (first_of(1, "added", "<i4", 9), "receipt: prompt of 5 tokens"),
    "a token of a branch": (first_of(2, "added", "<i4", 9), "receipt: prompt of 3 tokens"),
    "a logprob": (first_of(0, "logprobs", "<f4", -0.75), "receipt: answer after 2 tokens"),
    "a version": (first_of(1, "versions", "<i4", 1), "receipt: answer after 5 tokens"),
    "a longer prompt": (field(2, added=NODES[2].added * 2), "length"),
    "a branch from another turn": (field(2, parent=1, shared=3, added=b""), "receipt: prompt of 3"),
    "more tokens reused than sent": (field(1, reused=6), "receipt: range"),
    "a turn without digests": (field(1, prompt_digest=b""), "receipt: prompt of 5 tokens"),
    "swapped digests": (swapped, "receipt: answer after 2 tokens"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_audit_finds_a_wrong_receipt_by_its_trajectory(name: str, tmp_path: Path) -> None:
    tamper, what = TAMPERED[name]
    report = audited(tmp_path, tamper(INTACT))
    (problem,) = report.broken
    assert problem.startswith(f"1 payloads differ from their header ({what}")
    assert problem.endswith(": g0/1/agent")
    num_wrong = int(what.startswith("receipt"))
    assert report.turns.startswith(f"4 turns certified, {num_wrong} trajectories wrong")


def test_audit_finds_a_missing_turn(tmp_path: Path) -> None:
    last = pack(INTACT.prompt, NODES[:-1])
    (problem,) = audited(tmp_path, last).broken
    assert "(length)" in problem


def test_turns_without_a_receipt_each_are_found() -> None:
    header = replace(branched_header(INTACT, 0), turns=3)
    assert find_mismatch(header, INTACT) == "receipt: number"


def test_audit_counts_turns_tokens_and_branches(tmp_path: Path) -> None:
    report = audited(tmp_path, INTACT)
    assert report.ok, report.table()
    line = "8 turns certified, 0 trajectories wrong: 16 sampled tokens; "
    line += "prompt tokens: 26 reused, 10 new; 2 branches (edited 2)"
    assert report.turns == line
    assert line in report.table().splitlines()


def test_payload_of_an_older_version_passes_without_receipts(tmp_path: Path) -> None:
    report = audited(tmp_path, without_digests(INTACT))
    assert report.ok, report.table()
    assert report.turns.startswith("4 turns certified")
