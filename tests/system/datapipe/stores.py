"""Short forms of the calls that move a group store forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from arealite.api.rollout_messages import Episode, Lease, Progress, TurnHeader
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger.group import Group
from tests.payloads import GARBAGE
from tests.system.scenes import episode, failed, header

OpenStore = Callable[..., GroupStore]
"""The fixture `open_store`."""


def publish(store: GroupStore, version: int) -> None:
    store.version = version
    store.ledger.set_meta("version", str(version))


def lease_next(store: GroupStore, credit: int = 8) -> Lease:
    group = store.next_group()
    assert group
    return store.lease(group, worker_id="w", credit=credit)


def finish(
    store: GroupStore, lease: Lease, *members: int, reward: float | None = 1.0, **fields: Any
) -> None:
    """Finish these members of a lease, by default all."""
    for member in members or lease.members:
        store.add_episode(episode(lease, member, reward=reward, **fields), [GARBAGE])


def close_group(store: GroupStore, *rewards: float | None) -> Group:
    """Finish the episodes of the next group with these rewards; None: the episode fails."""
    group = store.next_group()
    assert group
    lease = store.lease(group, worker_id="w", credit=8)
    for member, reward in zip(lease.members, rewards, strict=True):
        if reward is None:
            store.add_episode(failed(lease, member, "boom"), [])
        else:
            store.add_episode(episode(lease, member, reward=reward), [GARBAGE])
    return group


def seated(lease: Lease, member: int, rewards: dict[str, float | None]) -> Episode:
    """Return a finished episode with a trajectory for each seat."""
    version = lease.version
    headers = [
        header(lease.group_id, member, version=version, reward=reward, seat=seat)
        for seat, reward in rewards.items()
    ]
    return Episode(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        member=member,
        headers=headers,
        failure=None,
    )


def add_turns(store: GroupStore, lease: Lease, turns: Sequence[TurnHeader]) -> None:
    """Store turns of a running episode."""
    payloads = [b"turn"] * len(turns)
    store.add_turns(
        Progress(
            worker_id="w", lease_id=lease.lease_id, group_id=lease.group_id, turns=list(turns)
        ),
        payloads,
    )


def train_step(store: GroupStore) -> list[int] | None:
    """Compose and train the next batch; return the ages of its tokens."""
    step, groups = store.next_step, store.compose()
    if groups is None:
        return None
    store.mark_trained(step)
    publish(store, step + 1)
    return [step - h.oldest_version for group in groups for h in group.headers]
