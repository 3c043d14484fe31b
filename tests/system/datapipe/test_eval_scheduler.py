"""Samples of an evaluation run until they finish or fail for good, in any order of results."""

from __future__ import annotations

import pytest

from arealite.system.datapipe import eval_scheduler
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from tests.system.scenes import episode, failed, tasks


def test_each_failed_sample_counts_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(eval_scheduler.time, "monotonic", lambda: now)
    evals = EvalScheduler(tasks(1, "eval"), samples=2, max_attempts=2)
    evals.begin(0)
    first = evals.lease(boot=1, version=0, credit=2)
    assert first
    assert evals.lease(boot=1, version=0, credit=2) is None
    assert evals.add_episode(failed(first, 0))
    assert not evals.add_episode(failed(first, 0)), "a result that comes twice"
    assert evals.lease(boot=1, version=0, credit=2) is None, "what failed rests"
    now += 1.0
    again = evals.lease(boot=1, version=0, credit=2)
    assert again
    assert again.members == [0]
    evals.release(first, is_lost=True)
    assert not evals.add_episode(episode(first, 1)), "a result of a lost lease"
    last = evals.lease(boot=1, version=0, credit=2)
    assert last
    assert last.members == [1], "only what the lost lease still ran is offered again"
    evals.release(last, is_lost=False)
    last = evals.lease(boot=1, version=0, credit=2)
    assert last, "a lease that was given up is no attempt"
    assert evals.add_episode(episode(last, 1, reward=0.5))
    assert evals.take_finished() == []
    evals.release(again, is_lost=True)
    ((eval_id, metrics),) = evals.take_finished()
    assert (eval_id, metrics["eval/failed"], metrics["eval/reward"]) == (0, 1.0, 0.5)


def test_roll_back_drops_running_evaluations_and_later_results() -> None:
    evals = EvalScheduler(tasks(1, "eval"), samples=1, max_attempts=2)
    for eval_id in (1, 2, 3):
        evals.begin(eval_id)
        lease = evals.lease(boot=1, version=0, credit=1)
        assert lease
        if eval_id < 3:
            evals.add_episode(episode(lease, 0))
            evals.take_finished()
    evals.forget(after=1)
    assert (list(evals.results), evals.runs) == ([1], {})
    evals.begin(3)
    assert not evals.add_episode(episode(lease, 0)), "sampled by a policy that is no more"


def test_pass_at_k_leaves_failed_samples_out() -> None:
    evals = EvalScheduler(tasks(2, "eval"), samples=3, max_attempts=1)
    evals.begin(0)
    for rewards in ((1.0, 0.0, 0.0), (0.0, 0.0, None)):
        lease = evals.lease(boot=1, version=0, credit=3)
        assert lease
        for member, reward in enumerate(rewards):
            if reward is None:
                evals.add_episode(failed(lease, member))
            else:
                evals.add_episode(episode(lease, member, reward=reward))
    ((_, metrics),) = evals.take_finished()
    told = {key: value for key, value in metrics.items() if "pass@" in key}
    assert told == {
        "eval/pass@1": pytest.approx((1 / 3 + 0) / 2),
        "eval/pass@2": pytest.approx((2 / 3 + 0) / 2),
        "eval/pass@3": 1.0,  # only the first task has three samples
    }


def test_samples_without_a_score_are_counted_and_left_out() -> None:
    evals = EvalScheduler(tasks(2, "eval"), samples=3, max_attempts=1)
    evals.begin(0)
    for rewards in ((1.0, None, 0.5), (None, None, None)):
        lease = evals.lease(boot=1, version=0, credit=3)
        assert lease
        for member, reward in enumerate(rewards):
            evals.add_episode(episode(lease, member, reward=reward))
    ((_, metrics),) = evals.take_finished()
    assert (metrics["eval/reward"], metrics["eval/unscored"]) == (0.75, 4.0)
    assert (metrics["eval/pass@1"], metrics["eval/pass@2"]) == (0.5, 1.0)
    assert "eval/pass@3" not in metrics
    assert metrics["eval/reward/s0"] == 0.75 and "eval/reward/s1" not in metrics


def test_row_with_pass_at_k_has_its_own_number_of_samples() -> None:
    usual, own, odd = tasks(3, "eval")
    own.extra_info["pass@k"] = 4
    odd.extra_info["pass@k"] = 0.25
    evals = EvalScheduler([usual, own, odd], samples=1, max_attempts=1)
    evals.begin(0)
    for members in ([0], [0, 1, 2, 3], [0]):
        lease = evals.lease(boot=1, version=0, credit=8)
        assert lease and lease.members == members
        for member in members:
            assert evals.add_episode(episode(lease, member, reward=float(member == 3)))
    ((_, metrics),) = evals.take_finished()
    assert metrics["eval/pass@4"] == 1.0, "of the only row with four samples"
    assert metrics["eval/pass@1"] == pytest.approx(0.25 / 3)
