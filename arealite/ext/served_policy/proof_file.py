"""The file of a run with its proofs: the trainer's scores of each version, and servers' results.

A proof is a comparison of scores, the log-probabilities of a fixed row. Rank 0 appends a line for
each version that it stages, and for each comparison. A version that is staged again, after a
roll-back, has a later line.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    """Of each token of the row but the first one."""
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
        """Return the trainer's scores by version."""
        return {
            line.version: np.array(line.scores)
            for line in self.lines()
            if isinstance(line, VersionScores)
        }


def notes(root: Path, config: dict[str, Any] | None = None) -> list[str]:
    """Return a line about each fault, and about the versions of a run that were never proven.

    Args:
        root: The run folder.
        config: The config of the run as saved; None: unknown.
    """
    staged = set[int]()
    proven = set[int]()
    obstacles = dict[int, str]()
    fault_notes = list[str]()
    for line in ProofFile(root).lines():
        if isinstance(line, VersionScores):
            staged.add(line.version)
        elif line.is_proven:
            proven.add(line.version)
        elif line.fault:
            fault_notes.append(f"server {line.server} at version {line.version}: {line.fault}")
        else:
            obstacles[line.version] = f"server {line.server}: {line.obstacle}"
    unproven = sorted(staged - proven)
    if unproven:
        reason = obstacles.get(unproven[-1], "no server has answered")
        fault_notes.append(f"served weights never proven: {_versions(unproven)} ({reason})")
    if not staged and config and not _is_on(config):
        fault_notes.append("served weights never proven (trainer.ppo.publisher.canary=false)")
    return fault_notes


def _versions(versions: Sequence[int]) -> str:
    """Return the number of versions, and the last ones."""
    listed = ", ".join(map(str, versions[-SHOWN:]))
    earlier = "… " if versions[:-SHOWN] else ""
    return f"{len(versions)} versions: {earlier}{listed}"


def _is_on(config: dict[str, Any]) -> bool:
    """Return whether a saved config has the canary; one without the option is of an older run."""
    publisher = config["trainer"]["ppo"]["publisher"]
    return bool(publisher.get("canary", True))
