"""The audit recomputes the receipts of turns: prompts as sent, answers as they arrived."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from arealite.api.episode import Origin, Record
from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.trajectory import Segment, TrajectoryHeader, encode_segments
from arealite.impl.rollout.collector import make_segments
from arealite.system.ledger.audit import audit
from arealite.system.ledger.audit_report import AuditReport
from arealite.system.ledger.payloads import find_mismatch
from tests.impl.view.runs import make_run

Tamper = Callable[[list[Segment]], list[Segment]]


def session() -> list[Segment]:
    """Return a session of four turns in two segments: the third is a branch."""
    record = Record()
    for prompt, origin in [
        ([1, 2], Origin(0, 2, "first")),
        ([1, 2, 7, 8, 3], Origin(4, 1)),
        ([1, 2, 4], Origin(2, 1, "edited")),
        ([1, 2, 7, 8, 3, 7, 8, 5], Origin(7, 1)),
    ]:
        turn = record.begin(prompt, SamplingConfig(), origin)
        turn.response = LLMResponse([7, 8], [-0.5, -0.25], [0, 1], "stop")
        record.add(turn)
    return make_segments(record.turns)


def header(segments: list[Segment], member: int) -> TrajectoryHeader:
    lengths = [len(segment.loss_mask) for segment in segments]
    ids = (f"g0/{member}/agent", "g0", member, "agent", "train-0")
    return TrajectoryHeader(*ids, 0.0, {}, lengths, 8, 0, 1, 4, False, 0, 0.1, {})


def audited(root: Path, segments: list[Segment]) -> AuditReport:
    """Write a ledger whose first trajectory is intact, with right checksums; audit it."""
    members = [session(), segments]
    rows = [(0, header(each, member), each) for member, each in enumerate(members)]
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
    "more tokens taken than sent": (receipt(taken=6), "receipt: range"),
    "a segment without receipts": (less_receipts, "receipt: number"),
    "swapped digests": (swapped, "receipt: answer after 2 tokens"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_audit_finds_a_wrong_receipt_by_its_trajectory(name: str, tmp_path: Path) -> None:
    tamper, what = TAMPERED[name]
    report = audited(tmp_path, tamper(session()))
    assert report.broken == [f"1 payloads differ from their header ({what}): g0/1/agent"]


def test_audit_counts_turns_tokens_and_branches(tmp_path: Path) -> None:
    report = audited(tmp_path, session())
    assert report.ok, report.table()
    line = "8 turns certified: 26 tokens taken, 10 rendered anew, 2 branches (edited 2)"
    assert report.turns == line
    assert line in report.table().splitlines()


def test_payload_of_an_older_version_passes_without_receipts(tmp_path: Path) -> None:
    report = audited(tmp_path, [replace(segment, turns=[]) for segment in session()])
    assert report.ok, report.table()
    assert report.turns.startswith("4 turns certified")


def test_sampled_token_without_a_receipt_is_found() -> None:
    (branch, line) = session()
    short = replace(line, turns=line.turns[:-1])
    segments = [branch, short]
    made = replace(header(segments, 0), turns=3)
    assert find_mismatch(made, encode_segments(segments)) == "receipt: mask"
