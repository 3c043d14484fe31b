"""The file of a run with its proofs: the trainer's scores of each version, and servers' results.

A proof is a comparison of scores, the log-probabilities of a fixed row. Rank 0 appends a line for
each version that it stages, and for each comparison. A version that is staged again, after a
roll-back, has a later line.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

FILE = "served_policy.jsonl"
"""The file's name in the run folder."""
SHOWN = 5
"""Largest number of versions in one line."""


class VersionScores(msgspec.Struct, kw_only=True, tag="version"):
    """The trainer's scores of a version."""

    version: int
    scores: list[float]
    """The log-probability of each token of the row but the first one."""
    seconds: float
    """Time of the forward pass."""


class ServerProof(msgspec.Struct, kw_only=True, tag="server"):
    """The result of one proof of a server."""

    version: int
    server: str
    is_proven: bool = False
    fault: str = ""
    """Why it has other weights; "" if it has not, or if nothing was compared."""
    obstacle: str = ""
    """Why nothing was compared."""
    mean: float = 0.0
    """Mean difference from the trainer's scores."""
    largest: float = 0.0
    seconds: float = 0.0
    """Time of the requests."""


Line = VersionScores | ServerProof


class SentVersion(msgspec.Struct, kw_only=True):
    """The ledger's record of a version."""

    fingerprint: str
    """The fingerprint of the weights that were sent to the servers."""
    scores: list[float]
    """The trainer's scores."""


class ProofFile:
    """Appends to the file of a run folder, and reads it."""

    def __init__(self, root: Path) -> None:
        self.path = root / FILE

    def append(self, line: Line) -> None:
        """Append a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def lines(self) -> Iterator[Line]:
        """Yield the complete lines of the file; none if it does not exist."""
        raw_lines: list[bytes] = []
        with suppress(OSError):
            raw_lines = self.path.read_bytes().splitlines()
        for raw_line in raw_lines:
            with suppress(msgspec.MsgspecError):  # its writer was killed
                yield msgspec.json.decode(raw_line, type=Line)  # type: ignore[arg-type]

    def scores(self) -> dict[int, np.ndarray]:
        """Return the trainer's scores by version, in ascending order."""
        scores = {
            line.version: np.array(line.scores)
            for line in self.lines()
            if isinstance(line, VersionScores)
        }
        return dict(sorted(scores.items()))


def proof_notes(root: Path) -> list[str]:
    """Return a line about each server's last fault, and one about versions never proven.

    A run without the canary has no file, and no line.
    """
    unproven = dict[int, str]()
    """The reason, by version."""
    faults = dict[str, str]()
    for line in ProofFile(root).lines():
        if isinstance(line, VersionScores):
            unproven[line.version] = "no server has answered"
        elif line.is_proven:
            unproven.pop(line.version, None)
        elif line.version in unproven:
            unproven[line.version] = f"server {line.server}: {line.fault or line.obstacle}"
        if isinstance(line, ServerProof) and line.fault:
            faults[line.server] = f"server {line.server}, version {line.version}: {line.fault}"
    if not unproven:
        return [*faults.values()]
    *_, last_reason = unproven.values()
    versions = ", ".join(map(str, [*unproven][-SHOWN:]))
    if len(unproven) > SHOWN:
        versions = f"… {versions}"
    counts = f"{len(unproven)} in all"
    summary = f"served weights never proven at versions {versions} ({counts}; {last_reason})"
    return [*faults.values(), summary]


def sent_notes(records: Mapping[int, str]) -> list[str]:
    """Return a line about the weights of versions in the ledger; none without a canary.

    Args:
        records: `PolicyProof.record` by version, in ascending order.
    """
    sent = dict[int, SentVersion]()
    for version, record in records.items():
        with suppress(msgspec.MsgspecError):  # the audit reports changed rows
            sent[version] = msgspec.json.decode(record, type=SentVersion)
    if not sent:
        return []
    num_different = len({record.fingerprint for record in sent.values()})
    newest = max(sent)
    return [
        f"weights sent: {len(sent)} versions, {num_different} different fingerprints; "
        f"version {newest}: {sent[newest].fingerprint}"
    ]
