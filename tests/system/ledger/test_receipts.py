"""The audit recomputes the receipts of turns: prompts as sent, answers as they arrived."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from arealite.api.payloads import encode_segments
from arealite.api.trajectory import Segment
from arealite.ext.audit.audit import audit
from arealite.ext.audit.audit_report import AuditReport
from arealite.system.ledger.payload_checks import find_mismatch
from tests.ext.view.runs import branched_header, branched_session, make_run

Tamper = Callable[[list[Segment]], list[Segment]]


def audited(root: Path, segments: list[Segment]) -> AuditReport:
    """Write a ledger whose first trajectory is intact, with right checksums; audit it."""
    members = [branched_session(), segments]
    rows = [(0, branched_header(each, member), each) for member, each in enumerate(members)]
    return audit(make_run(root, rows).ledger)


def changed(name: str, kind: str, at: int, value: float) -> Tamper:
    """Return a change of one token in one array of the last segment."""

    def tamper(segments: list[Segment]) -> list[Segment]:
        array = np.frombuffer(getattr(segments[-1], name), kind).copy()
        array[at] = value
        return [*segments[:-1], replace(segments[-1], **{name: array.tobytes()})]

    return tamper


def receipt(**fields: object) -> Tamper:
    """Return a change of the second receipt of the last segment."""

    def tamper(segments: list[Segment]) -> list[Segment]:
        *others, last = segments
        first, second, *rest = last.turns
        return [*others, replace(last, turns=[first, replace(second, **fields), *rest])]

    return tamper


def less_receipts(segments: list[Segment]) -> list[Segment]:
    return [replace(segments[0], turns=[]), *segments[1:]]


def swapped(segments: list[Segment]) -> list[Segment]:
    """Give the turns of a segment each other's answer digest."""
    *others, last = segments
    first, second, *rest = last.turns
    pair = [replace(first, answer=second.prompt), replace(second, answer=first.prompt)]
    return [*others, replace(last, turns=[*pair, *rest])]


TAMPERED: dict[str, tuple[Tamper, str]] = {
    "a token of the prompt": (changed("tokens", "<i4", 1, 9), "receipt: prompt of 2 tokens"),
    "a sampled token": (changed("tokens", "<i4", 3, 9), "receipt: answer after 2 tokens"),
    "an observed token": (changed("tokens", "<i4", 4, 9), "receipt: prompt of 5 tokens"),
    "a logprob": (changed("logprobs", "<f4", 3, -0.75), "receipt: answer after 2 tokens"),
    "a version": (changed("versions", "<i4", 6, 0), "receipt: answer after 5 tokens"),
    "a receipt's length": (receipt(length=1), "receipt: answer after 5 tokens"),
    "a receipt's start": (receipt(start=6), "receipt: prompt of 6 tokens"),
    "overlapping receipts": (receipt(start=3), "receipt: range"),
    "a receipt beyond the segment": (receipt(length=90), "receipt: range"),
    "more tokens reused than sent": (receipt(reused=6), "receipt: range"),
    "a segment without receipts": (less_receipts, "receipt: number"),
    "swapped digests": (swapped, "receipt: answer after 2 tokens"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_audit_finds_a_wrong_receipt_by_its_trajectory(name: str, tmp_path: Path) -> None:
    tamper, what = TAMPERED[name]
    report = audited(tmp_path, tamper(branched_session()))
    assert report.broken == [f"1 payloads differ from their header ({what}): g0/1/agent"]
    assert report.turns.startswith("4 turns certified, 1 trajectories wrong")


def test_audit_counts_turns_tokens_and_branches(tmp_path: Path) -> None:
    report = audited(tmp_path, branched_session())
    assert report.ok, report.table()
    line = "8 turns certified, 0 trajectories wrong: 16 sampled tokens; "
    line += "prompt tokens: 26 reused, 10 new; 2 branches (edited 2)"
    assert report.turns == line
    assert line in report.table().splitlines()


def test_payload_of_an_older_version_passes_without_receipts(tmp_path: Path) -> None:
    report = audited(tmp_path, [replace(segment, turns=[]) for segment in branched_session()])
    assert report.ok, report.table()
    assert report.turns.startswith("4 turns certified")


def test_sampled_token_without_a_receipt_is_found() -> None:
    (branch, line) = branched_session()
    short = replace(line, turns=line.turns[:-1])
    segments = [branch, short]
    made = replace(branched_header(segments, 0), turns=3)
    assert find_mismatch(made, encode_segments(segments)) == "receipt: mask"
