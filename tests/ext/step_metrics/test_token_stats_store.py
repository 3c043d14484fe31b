"""Token statistics are read as written; damaged files are skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from arealite.ext.step_metrics.token_stats_store import TokenStats, read, write


def stats(name: str, *values: float) -> TokenStats:
    half = np.array(values, "<f2")
    return TokenStats(
        trajectory_ids=[f"{name}/0", f"{name}/1"],
        counts=[1, len(values) - 1],
        advantages=half.tobytes(),
        differences=(-half).tobytes(),
    )


def test_ranks_are_joined_and_a_repeated_step_replaces_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "token_stats"
    for rank in range(3):
        write(folder, 12, rank, stats("old", 9.0, 9.0))
    write(folder, 12, 0, stats("a", 1.0, 2.0, 3.0))
    write(folder, 12, 1, stats("b", 4.0, 5.0))
    found = read(folder, 12, ranks=2)
    assert {name: pair[0].tolist() for name, pair in found.items()} == {
        "a/0": [1.0], "a/1": [2.0, 3.0], "b/0": [4.0], "b/1": [5.0],
    }  # fmt: skip
    assert found["a/1"][1].tolist() == [-2.0, -3.0]
    assert min(file.name for file in folder.iterdir()) == "000012-0.msgpack"


def test_incomplete_or_missing_files_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, stats("a", 1.0, 2.0))
    write(tmp_path, 0, 1, stats("b", 1.0, 2.0))
    torn = tmp_path / "000000-0.msgpack"
    torn.write_bytes(torn.read_bytes()[:-3])
    (tmp_path / "000000-2.msgpack").mkdir()
    assert set(read(tmp_path, 0, ranks=5)) == {"b/0", "b/1"}
    assert read(tmp_path / "nothing", 0, ranks=1) == {}
