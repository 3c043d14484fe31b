"""The next class follows from success rates, its rows from their order, both from the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from arealite.api.experiment_config import CurriculumConfig, DatapipeConfig, ExperimentConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.curriculum.curriculum import Curriculum
from arealite.system.data.dataset import make_sampler, permutation
from arealite.system.datapipe.group_store import GroupStore
from tests.payloads import GARBAGE
from tests.system.datapipe.stores import OpenStore
from tests.system.scenes import episode, failed

LEVELS = {"easy": 6, "fair": 6, "hard": 3}
Chance = Callable[[str, int], float]


def rows() -> list[Task]:
    names = [name for name, count in LEVELS.items() for _ in range(count)]
    return [
        Task(task_id=f"train-{n}", prompt="?", ground_truth=None, extra_info={"level": name})
        for n, name in enumerate(names)
    ]


@pytest.fixture
def opened(open_store: OpenStore) -> Callable[..., GroupStore]:
    """Return a function that opens a store with a curriculum; later calls resume the run."""
    stores: list[GroupStore | None] = [None]

    def build(*, by: str = "level") -> GroupStore:
        datapipe = DatapipeConfig(curriculum=CurriculumConfig(by=by, window=8))
        config = ExperimentConfig(seed=1, datapipe=datapipe)
        store = open_store(
            again=stores[-1],
            rows=rows(),
            sampler=make_sampler(config, rows()),
            num_groups=4,
            group_size=4,
            max_staleness=400,
            max_attempts=1,
        )
        stores.append(store)
        return store

    return build


def curriculum(store: GroupStore) -> Curriculum:
    assert isinstance(store.sampler, Curriculum)
    return store.sampler


def play(store: GroupStore, groups: int, chance: Chance) -> Counter[str]:
    """Finish groups; member m of n succeeds if m < n·chance."""
    drawn = Counter[str]()
    for _ in range(groups):
        group = store.next_group()
        assert group is not None
        lease = store.lease(group, worker_id="w", credit=9)
        name = group.task.extra_info["level"]
        drawn[name] += 1
        for member in lease.members:
            won = member < group.size * chance(name, group.seq)
            store.add_episode(episode(lease, member, reward=float(won)), [GARBAGE])
    return drawn


def learned(name: str, seq: int) -> float:
    return {"easy": 1.0, "fair": 0.5, "hard": 0.0}[name]


def test_classes_of_uncertain_outcome_are_drawn_more_often(
    opened: Callable[..., GroupStore],
) -> None:
    store = opened()
    play(store, 100, learned)
    drawn = play(store, 300, learned)
    assert drawn["fair"] > 2 * drawn["easy"] > 2 * drawn["hard"] > 0
    told = curriculum(store).metrics()
    assert told["curriculum/easy/success"] == 0.9
    assert told["curriculum/hard/success"] == pytest.approx(0.1)
    shares = [told[f"curriculum/{name}/share"] for name in LEVELS]
    assert sum(shares) == pytest.approx(1.0)
    assert drawn["fair"] / 300 == pytest.approx(shares[1], abs=0.1)


def test_draws_follow_the_current_success_rate(opened: Callable[..., GroupStore]) -> None:
    store = opened()
    play(store, 150, learned)
    play(store, 150, lambda name, seq: {"easy": 1.0, "fair": 1.0, "hard": 0.5}[name])
    rates = curriculum(store).metrics()
    assert rates["curriculum/fair/success"] > 0.85
    assert rates["curriculum/hard/success"] == pytest.approx(0.5, abs=0.1)


def test_rows_of_a_class_are_drawn_in_its_own_order_epoch_by_epoch(
    opened: Callable[..., GroupStore],
) -> None:
    store = opened()
    play(store, 60, learned)
    found = "SELECT row, epoch FROM groups ORDER BY seq"
    store.ledger.commit()
    by_class: dict[str, list[tuple[int, int]]] = {name: [] for name in LEVELS}
    for row, epoch in store.ledger.connection.execute(found):
        by_class[rows()[row].extra_info["level"]].append((row, epoch))
    first = 0
    for name, size in LEVELS.items():
        due = [(first + row, e) for e in range(60) for row in permutation(1, e, size)]
        assert by_class[name] == due[: len(by_class[name])]
        first += size


def test_resumed_run_draws_the_same_tasks(opened: Callable[..., GroupStore]) -> None:
    store = opened()
    play(store, 40, learned)
    went_on = opened()
    assert curriculum(went_on).recent == curriculum(store).recent
    assert curriculum(went_on).offered == curriculum(store).offered
    expected = [curriculum(store).draw(seq) for seq in range(40, 60)]
    assert [curriculum(went_on).draw(seq) for seq in range(40, 60)] == expected


def test_groups_without_variance_update_the_rate_and_empty_groups_do_not(
    opened: Callable[..., GroupStore],
) -> None:
    store = opened()
    store.ppo = replace(store.ppo, filter_zero_variance=True)
    play(store, 3, lambda name, seq: 1.0)
    group = store.next_group()
    assert group is not None
    lease = store.lease(group, worker_id="w", credit=9)
    for member in lease.members:
        store.add_episode(failed(lease, member), [])
    assert group.state == "filtered"
    known = [share for own in curriculum(store).recent.values() for share in own.values()]
    assert known == [1.0] * 3
    went_on = opened()
    assert curriculum(went_on).recent == curriculum(store).recent


def test_samples_without_a_score_do_not_change_the_rate(
    opened: Callable[..., GroupStore],
) -> None:
    store = opened()
    for rewards in ((1.0, None), (None, None)):
        group = store.next_group()
        assert group is not None
        lease = store.lease(group, worker_id="w", credit=9)
        for member in lease.members:
            made = episode(lease, member, reward=rewards[min(member, 1)])
            store.add_episode(made, [GARBAGE])
    known = [share for own in curriculum(store).recent.values() for share in own.values()]
    assert known == [1.0]
    went_on = opened()
    assert curriculum(went_on).recent == curriculum(store).recent


def test_curriculum_can_be_enabled_and_disabled_within_a_trial(
    opened: Callable[..., GroupStore],
) -> None:
    play(opened(by=""), 20, learned)
    store = opened()
    assert sum(curriculum(store).offered.values()) == 20
    assert any(curriculum(store).recent.values())
    play(store, 20, learned)
    off = opened(by="")
    assert off.sampler.metrics() == {}
    expected = [(2, row) for row in permutation(1, 2, 15)[10:]]
    assert [off.sampler.draw(seq) for seq in range(40, 45)] == expected, "as if always off"


def test_rows_of_one_class_are_refused() -> None:
    with pytest.raises(UserError, match=r"curriculum\.by=levle: all rows are of one class, ''"):
        Curriculum(CurriculumConfig(by="levle"), rows(), seed=1, shuffle=True)


def test_class_without_a_closed_group_has_no_success_rate(
    opened: Callable[..., GroupStore],
) -> None:
    store = opened()
    assert curriculum(store).metrics().keys() == {f"curriculum/{name}/share" for name in LEVELS}
    drawn = play(store, 1, learned)
    (name,) = drawn
    rates = {key for key in curriculum(store).metrics() if key.endswith("/success")}
    assert rates == {f"curriculum/{name}/success"}
