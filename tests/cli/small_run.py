"""The options of a small run, for the tests of what is checked before a run starts."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import write_rows


def small_run(folder: Path, model: Path) -> list[str]:
    """Write 64 rows to a folder; return the options of a run whose files are in this folder."""
    write_rows(folder / "train.jsonl", 64, seed=1)
    return [
        f"model.path={model}",
        f"dataset.train={folder / 'train.jsonl'}",
        f"cluster.run_root={folder}",
        f"cluster.name_root={folder / 'names'}",
        "trainer.ppo.batch_size=16",
        "trainer.ppo.collector.group_size=4",
        "trainer.ppo.collector.concurrency=8",
        "trainer.ppo.collector.sampling.max_new_tokens=6",
    ]
