"""The notes of `audit`, `report` and `why` about the proofs of a run."""

from __future__ import annotations

from pathlib import Path

from arealite.ext.served_policy.proof_file import (
    ProofFile,
    ServerProof,
    VersionScores,
    proof_notes,
)


def staged(version: int) -> VersionScores:
    return VersionScores(version=version, scores=[-1.0], seconds=0.1)


def test_run_whose_versions_are_proven_has_no_note(tmp_path: Path) -> None:
    file = ProofFile(tmp_path)
    for version in range(3):
        file.append(staged(version))
        file.append(ServerProof(version=version, server="a", is_proven=True))
        file.append(ServerProof(version=version, server="b", obstacle="no answer"))
    assert proof_notes(tmp_path) == []
    assert [*file.scores()] == [0, 1, 2]


def test_run_without_the_file_has_no_note(tmp_path: Path) -> None:
    assert proof_notes(tmp_path) == []


def test_faults_and_versions_never_proven_are_listed(tmp_path: Path) -> None:
    file = ProofFile(tmp_path)
    for version in range(7):
        file.append(staged(version))
        file.append(ServerProof(version=version, server="a", fault="old weights"))
    with file.path.open("ab") as stream:
        stream.write(b'{"type":"server","version":7,"ser')  # its writer was killed
    assert proof_notes(tmp_path) == [
        "server a, version 6: old weights",
        "served weights never proven at versions … 2, 3, 4, 5, 6 (7 in all; server a: old weights)",
    ]


def test_version_staged_again_must_be_proven_again(tmp_path: Path) -> None:
    file = ProofFile(tmp_path)
    file.append(staged(1))
    file.append(ServerProof(version=1, server="a", is_proven=True))
    file.append(staged(1))
    note = "served weights never proven at versions 1 (1 in all; no server has answered)"
    assert proof_notes(tmp_path) == [note]
