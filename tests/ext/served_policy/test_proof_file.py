"""The notes of `audit`, `report` and `why` about the proofs of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from arealite.ext.served_policy.proof_file import (
    ProofFile,
    SentVersion,
    ServerProof,
    VersionScores,
    proof_notes,
    sent_notes,
)
from arealite.ext.served_policy.sent_weights import CHUNK_BYTES, SentWeights


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


def sent(fingerprint: str) -> str:
    return msgspec.json.encode(SentVersion(fingerprint=fingerprint, scores=[-1.0])).decode()


def test_ledger_shows_what_was_sent() -> None:
    assert sent_notes({}) == []
    records = {0: sent("aa"), 1: sent("bb"), 2: sent("bb"), 3: "no record"}
    line = "weights sent: 3 versions, 2 different fingerprints; version 2: bb"
    assert sent_notes(records) == [line]


def text_of(tensors: dict[str, torch.Tensor]) -> str:
    weights = SentWeights()
    for name, tensor in tensors.items():
        weights.add(name, tensor)
    return weights.fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (7, 13), (99, 130)])
def test_fingerprint_changes_with_each_number_name_and_order(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(shape).to(dtype), "b": torch.randn(shape).to(dtype)}
    text = text_of(tensors)
    assert len(text) == 16
    assert text_of({name: tensor.clone() for name, tensor in tensors.items()}) == text
    assert text_of({"a": tensors["b"], "b": tensors["a"]}) != text
    assert text_of({"a": tensors["a"], "c": tensors["b"]}) != text
    last = tensors["b"].clone()
    last.view(-1)[-1] += 1.0
    assert text_of(tensors | {"b": last}) != text


def test_fingerprint_of_a_view_is_that_of_its_numbers() -> None:
    matrix = torch.randn(64, CHUNK_BYTES // 64)
    assert text_of({"a": matrix.T}) == text_of({"a": matrix.T.contiguous()})
    vector = torch.randn(2 * CHUNK_BYTES)[1:]
    assert text_of({"a": vector}) == text_of({"a": vector.clone()})
    assert text_of({"a": matrix[1:]}) == text_of({"a": matrix[1:].clone()})
