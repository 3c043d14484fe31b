"""The simulation detects each bug planted into the package, and no bug without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from arealite.algo import staleness
from arealite.api.rollout_messages import Ack
from arealite.system.datapipe.effects import Effect, Outbox, Send
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.workers import Workers
from tests.simulation.simulation import simulate

SEEDS = 200
"""Number of seeds within which a planted bug must be found."""
Plant = Callable[[pytest.MonkeyPatch], None]


def acknowledged_before_the_write(patch: pytest.MonkeyPatch) -> None:
    after_commit = Outbox.after_commit

    def at_once(outbox: Outbox, effect: Effect | None, *, hurry: bool = False) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Ack):
            outbox.perform(effect)
            after_commit(outbox, None)
        else:
            after_commit(outbox, effect, hurry=hurry)

    patch.setattr(Outbox, "after_commit", at_once)


def not_restored(name: str, empty: Callable[[], Any]) -> Plant:
    """Return a bug: one attribute is not restored from the ledger."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        load = GroupStore._load

        def forgetful(store: GroupStore) -> None:
            load(store)
            setattr(store, name, empty())

        patch.setattr(GroupStore, "_load", forgetful)

    return plant


def failures_not_restored(patch: pytest.MonkeyPatch) -> None:
    load = GroupStore._load

    def forgetful(store: GroupStore) -> None:
        load(store)
        for group in store.groups.values():
            group.failures = []

    patch.setattr(GroupStore, "_load", forgetful)


def anything_fits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(staleness, "fits", lambda *_, **__: True)


def leases_never_expire(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "expire", lambda _: iter(()))


KILLS = {"faults_per_s": 0.7, "fault_s": 20.0, "weights": {"kill datapipe": 1.0}}
PLANTS: dict[str, tuple[Plant, dict[str, Any]]] = {
    "acknowledged before the write": (acknowledged_before_the_write, {}),
    "counts not restored": (not_restored("counts", Counter), {}),
    "cursor not restored": (not_restored("offered", int), {}),
    "planned batches not restored": (not_restored("_planned", dict), {}),
    "failures not restored": (
        failures_not_restored,
        {**KILLS, "failure_rate": 0.3, "max_attempts": 2, "partial_group": "retry"},
    ),
    "anything fits": (
        anything_fits,
        {"policy": "wait", "eta": 1, "num_groups": 1, "updates": 1, "tail_share": 0.2,
         "concurrency": 8, "episode_timeout_s": 30.0, "fault_s": 20.0},
    ),
    "leases never expire": (
        leases_never_expire,
        {**KILLS, "weights": {"kill launcher": 1.0}, "workers": 3, "policy": "wait"},
    ),
}  # fmt: skip
"""By name: the bug, and settings of the scenario that expose it sooner."""


@pytest.mark.parametrize("name", PLANTS)
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, changes = PLANTS[name]
    with monkeypatch.context() as patch:
        plant(patch)
        found = next((s for s in range(SEEDS) if simulate(s, **changes).violation), None)
    assert found is not None, f"not within {SEEDS} seeds"
    assert simulate(found, **changes).violation is None, "it fails without the plant"
