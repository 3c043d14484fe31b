"""The wait that a rank shows in its vitals while it waits for the datapipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from arealite.api.trainer_messages import Batch, Published, Waiting
from arealite.base.errors import RoleError
from arealite.system.health import waits
from arealite.system.links.trainer_link import TrainerLink


@pytest.fixture(autouse=True)
def no_other_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "table", set())


def test_wait_for_a_batch_shows_the_last_detail_of_the_datapipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = TrainerLink(resolve=lambda: None, rank=1, world_size=2)
    batch = Batch(step=3, headers=[], ranks=[], minibatches=[], mine=[], waits={})
    answers: Iterator[Any] = iter(
        [None, (Waiting(request="BatchRequest 3", detail="2 of 8 groups"), []), None, (batch, [])]
    )
    seen: list[tuple[str, str, bool, str]] = []

    def receive() -> Any:
        (wait,) = waits.table
        seen.append((wait.event, wait.on, wait.replies_soon, wait.detail))
        return next(answers)

    monkeypatch.setattr(link, "_receive", receive)
    assert link.next_batch(3) == (batch, [])
    assert [detail for *_, detail in seen] == ["", "", "2 of 8 groups", "2 of 8 groups"]
    assert {row[:3] for row in seen} == {("BatchRequest 3", "datapipe-0", True)}
    assert not waits.table


def test_wait_ends_if_no_datapipe_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    link = TrainerLink(resolve=lambda: None, rank=1, world_size=2, silence_s=0.4)
    with pytest.raises(
        RoleError, match=r"silent for \d+ s; trainer rank 1 waits for .*Published 3"
    ):
        link.report(Published(version=3))
    assert not waits.table


def test_datapipe_without_a_name_is_reported_with_the_folder_of_names() -> None:
    link = TrainerLink(resolve=lambda: None, rank=1, world_size=2, silence_s=0.4)
    with pytest.raises(RoleError, match=r"no address in cluster\.name_root, .*has been silent"):
        link.report(Published(version=3))
