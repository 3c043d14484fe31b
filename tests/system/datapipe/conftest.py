"""Fixtures of the datapipe's tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from arealite.api.task import Task, TaskSampler
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger import group as open_group
from arealite.system.ledger.ledger import Ledger
from tests.system.datapipe.stores import OpenStore, publish
from tests.system.scenes import experiment, tasks


@pytest.fixture
def open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenStore]:
    """Return a function that opens a store; failed episodes are leased again at once."""
    monkeypatch.setattr(open_group, "BACK_OFF_S", 0.0)
    ledgers: list[Ledger] = []

    def build(
        *,
        again: GroupStore | None = None,
        commits: bool = True,
        rows: Sequence[Task] = (),
        sampler: TaskSampler | None = None,
        **options: Any,
    ) -> GroupStore:
        """Open a new ledger at version 0, or that of `again`, as after a kill.

        Args:
            again: The store whose process was killed.
            commits: Commit the state of `again` before.
            rows: The tasks; by default four.
            sampler: What chooses the tasks; by default a permutation in each epoch.
            **options: Of `experiment`.
        """
        file = tmp_path / f"{len(ledgers)}.sqlite"
        if again is not None:
            if commits:
                again.ledger.commit()
            again.ledger.close()
            file = again.ledger.path
        ledgers.append(Ledger(file, fingerprint={}))
        train = rows or tasks(4)
        store = GroupStore(
            ledgers[-1],
            train,
            ppo=experiment(tmp_path, **options).trainer.ppo,
            sampler=sampler or Permutation(len(train), seed=1, shuffle=True),
        )
        if again is None:
            publish(store, 0)
        return store

    yield build
    for ledger in ledgers:
        ledger.close()
