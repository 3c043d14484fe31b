"""The order of operations in both trainers: start, steps, stop, resume and end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.api.algorithm import AdvantageConfig, KLConfig, LossConfig
from arealite.api.experiment_config import DatasetConfig, ExperimentConfig, run_paths
from arealite.api.trainer import CheckpointConfig, EvalConfig, PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.base.trial_files import RunPaths
from arealite.impl.engine import checkpoint
from arealite.impl.trainer import ppo
from arealite.impl.trainer.ppo import AsyncPPOTrainer, PPOTrainer
from arealite.impl.trainer.rank_group import World
from tests.impl.trainer.scripted import Events, ScriptedEngine, Stage
from tests.waiting import until

MakeConfig = Callable[..., ExperimentConfig]
BOTH = pytest.mark.parametrize("trainer", [PPOTrainer, AsyncPPOTrainer])


@pytest.fixture
def config(tmp_path: Path) -> MakeConfig:
    def make(
        *, resume: str = "auto", held_out: bool = False, every: int = 0, **ppo: Any
    ) -> ExperimentConfig:
        settings = {"total_steps": 3, "max_staleness": 0} | ppo
        return ExperimentConfig(
            resume=resume,
            cluster=ClusterConfig(run_root=str(tmp_path)),
            dataset=DatasetConfig(eval="held-out" if held_out else None),
            trainer=TrainerConfig(ppo=PPOConfig(eval=EvalConfig(every_steps=every), **settings)),
        )

    return make


def test_synchronous_run_has_this_order_of_operations(config: MakeConfig) -> None:
    stage = Stage()
    PPOTrainer(config(total_steps=2), stage.components()).train()
    assert stage.events.words == [
        *("start 0", "gather", "push 0", "published 0"),
        *("ask 0", "update 1", "report 0", "gather", "push 1", "published 1"),
        *("ask 1", "update 2", "report 1", "gather", "push 2", "published 2"),
        *("save step-000002", "checkpointed 2", "export", "finish: all steps are trained"),
        "publisher closed",
    ]
    assert stage.publisher.weights == {0: 0.0, 1: 1.0, 2: 2.0}
    threads = stage.events.threads
    assert {word for word in threads if threads[word] != "MainThread"} == {"ask 0", "ask 1"}


@BOTH
def test_in_process_generation_is_paused_during_updates(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    stage = Stage()
    stage.publisher.shares = True
    trainer(config(total_steps=2), stage.components()).train()
    turns = [w for w in stage.events.words if w.split()[0] in ("pause", "update", "gather")]
    assert turns == ["gather", *(w for k in (1, 2) for w in ("pause", f"update {k}", "gather"))]


def test_asynchronous_run_prefetches_batches_and_publishes_during_training(
    config: MakeConfig,
) -> None:
    stage = Stage()

    def on_update(count: int) -> None:
        if count == 1:
            until(lambda: "ask 1" in stage.events.words, what="the next batch to be asked for")
            stage.publisher.gate.clear()
        if count == 2:
            assert "push 1" not in stage.events.words  # the push is in progress
            stage.publisher.gate.set()

    stage.engine.on_update = on_update
    AsyncPPOTrainer(config(max_staleness=2), stage.components()).train()
    stage.events.order("ask 1", "report 0", "update 2", "push 1", "published 1", "push 2")
    stage.events.order("push 3", "save step-000003", "checkpointed 3", "export")
    assert stage.publisher.weights == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    threads = {word.split()[0]: name for word, name in stage.events.threads.items()}
    assert threads["ask"].startswith("fetch")
    assert threads["published"] == threads["push"] != "MainThread"
    assert threads["gather"] == threads["report"] == threads["update"] == "MainThread"


@BOTH
def test_initial_version_is_published_before_the_first_update(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    stage = Stage()
    trainer(config(), stage.components()).train()
    stage.events.order("start 0", "push 0", "published 0", "report 0", "push 1")


def test_all_updates_of_a_batch_share_one_proximal_policy(config: MakeConfig) -> None:
    stage = Stage(minibatches=2)
    PPOTrainer(config(total_steps=1, updates=2), stage.components()).train()
    stage.events.order("forward", "update 1", "update 2", "report 0")
    assert stage.events.words.count("forward") == 1


@pytest.mark.parametrize("centering", [False, True])
@pytest.mark.parametrize("updates", [1, 2])
def test_later_updates_have_the_top_logprobs_of_the_proximal_policy(
    config: MakeConfig, updates: int, centering: bool
) -> None:
    """A single update computes them itself."""
    stage = Stage(minibatches=updates)
    loss = LossConfig(centering=centering)
    PPOTrainer(config(total_steps=1, updates=updates, loss=loss), stage.components()).train()
    expected = centering and updates > 1
    assert ("prox_top_logprobs" in stage.engine.trained_fields) == expected


def test_batch_with_zero_advantages_is_reported_as_trained(config: MakeConfig) -> None:
    stage = Stage()
    stage.pipe.rewards = [1.0, 1.0]
    PPOTrainer(config(total_steps=1), stage.components()).train()
    assert stage.engine.updates == 0
    (report,) = stage.pipe.reports
    assert report.trained == ["a/0/agent", "a/1/agent", "b/0/agent", "b/1/agent"]
    assert report.metrics["update/skipped_update"] == 1.0


@BOTH
def test_times_of_each_step_sum_to_the_step_time(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    stage = Stage()
    trainer(config(), stage.components()).train()
    assert [step for step, _ in stage.logger.lines] == [1, 2, 3]
    for _, line in stage.logger.lines:
        whole = line.pop("time/step_s")
        parts = [v for k, v in line.items() if k.startswith(("time/", "wait/"))]
        assert sum(parts) == pytest.approx(whole)
        assert all("/" in name for name in line)
        assert all(isinstance(value, float) for value in line.values())
        for name in ("reward/mean", "loss/policy", "update/lr", "mismatch/kl", "datapipe/batch_s"):
            assert name in line
        assert line["throughput/trained_tokens_per_s"] > 0


@BOTH
def test_checkpoints_are_saved_at_every_steps_and_only_the_newest_are_kept(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    stage = Stage()
    made = config(total_steps=5, checkpoint=CheckpointConfig(every_steps=2, keep=2, export=False))
    trainer(made, stage.components()).train()
    saves = [word for word in stage.events.words if word.startswith("save")]
    assert saves == ["save step-000002", "save step-000004", "save step-000005"]
    kept = checkpoint.list_good(run_paths(made).checkpoints)
    assert [path.name for path in kept] == ["step-000004", "step-000005"]
    assert "export" not in stage.events.words


@BOTH
def test_evaluations_run_at_the_start_on_schedule_and_at_the_end(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    stage = Stage()
    trainer(config(total_steps=4, held_out=True, every=2), stage.components()).train()
    stage.events.order("published 0", "evaluate 0", "update 1", "update 2", "evaluate 2")
    stage.events.order("published 4", "evaluate 4", "finish: all steps are trained")
    assert sum(word.startswith("evaluate") for word in stage.events.words) == 3
    scores = [(step, line) for step, line in stage.logger.lines if "eval/reward" in line]
    assert scores == [(step, {"eval/reward": float(step)}) for step in (0, 2, 4)]


@BOTH
def test_first_sigterm_stops_the_run_after_the_step(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    stage = Stage()
    stage.engine.on_update = lambda count: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    made = config(held_out=True)
    trainer(made, stage.components()).train()
    assert stage.engine.updates == 1
    stage.events.order("report 0", "published 1", "save step-000001", "finish: asked to stop")
    assert "export" not in stage.events.words
    assert "evaluate 1" not in stage.events.words
    assert signal.getsignal(signal.SIGTERM) == before


@BOTH
def test_sigterm_ends_a_wait_for_a_batch(config: MakeConfig, trainer: type[PPOTrainer]) -> None:
    stage = Stage()
    stage.pipe.empty_from = 1
    made = trainer(config(), stage.components())

    def press() -> None:
        assert stage.pipe.waiting.wait(60.0)
        os.kill(os.getpid(), signal.SIGTERM)

    pressing = threading.Thread(target=press)
    pressing.start()
    made.train()
    pressing.join()
    stage.events.order("report 0", "save step-000001", "checkpointed 1")
    stage.events.order("ask 1", "finish: asked to stop")
    assert stage.engine.updates == 1


@pytest.mark.parametrize(("eval_id", "trained"), [(0, 0), (3, 3)])
@BOTH
def test_sigterm_ends_a_running_evaluation(
    config: MakeConfig, trainer: type[PPOTrainer], eval_id: int, trained: int
) -> None:
    stage = Stage()
    stage.pipe.eval_hangs = eval_id
    made = trainer(config(held_out=True), stage.components())

    def press() -> None:
        assert stage.pipe.waiting.wait(60.0)
        os.kill(os.getpid(), signal.SIGTERM)

    pressing = threading.Thread(target=press)
    pressing.start()
    made.train()
    pressing.join()
    reason = "all steps are trained" if trained else "asked to stop"
    stage.events.order(f"evaluate {eval_id}", f"finish: {reason}")
    stage.events.order(f"save step-00000{trained}", f"finish: {reason}")
    assert stage.engine.updates == trained


def test_second_sigterm_exits_at_once(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    stage = Stage()

    def press(count: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    stage.engine.on_update = press
    PPOTrainer(config(), stage.components()).train()
    assert codes == [128 + signal.SIGTERM]


@BOTH
def test_resume_continues_from_the_checkpoint(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    first = Stage()
    trainer(config(total_steps=2), first.components()).train()
    second = Stage()
    trainer(config(total_steps=4, held_out=True), second.components()).train()
    second.events.order("load step-000002", "start 2", "push 2", "published 2", "update 3")
    assert second.publisher.weights == {2: 2.0, 3: 3.0, 4: 4.0}
    assert [step for step, line in second.logger.lines if "reward/mean" in line] == [3, 4]
    assert second.logger.rewound == 2
    assert "evaluate 2" not in second.events.words
    assert second.logger.lines[0][1]["rollout/interrupted_generations"] == 5.0


@BOTH
def test_evaluation_due_at_the_checkpoint_is_requested_again_after_resume(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    trainer(config(total_steps=2), Stage().components()).train()
    again = Stage()
    trainer(config(total_steps=4, held_out=True, every=2), again.components()).train()
    again.events.order("push 2", "evaluate 2", "report 2", "evaluate 4")
    scores = [line["eval/reward"] for _, line in again.logger.lines if "eval/reward" in line]
    assert scores == [2.0, 4.0]


def test_resuming_a_finished_run_trains_nothing(config: MakeConfig) -> None:
    PPOTrainer(config(), Stage().components()).train()
    again = Stage()
    PPOTrainer(config(), again.components()).train()
    assert again.events.words == [
        *("load step-000003", "start 3", "gather", "push 3", "published 3"),
        *("export", "finish: all steps are trained", "publisher closed"),
    ]


def test_resume_must_needs_a_checkpoint_and_never_refuses_one(config: MakeConfig) -> None:
    with pytest.raises(
        UserError, match=r"resume=must, but the newest good checkpoint in .* is none"
    ):
        PPOTrainer(config(resume="must"), Stage().components()).train()
    PPOTrainer(config(), Stage().components()).train()
    with pytest.raises(UserError, match=r"resume=never, but .* is step-000003"):
        PPOTrainer(config(resume="never"), Stage().components()).train()


@BOTH
def test_failed_publish_stops_the_run(config: MakeConfig, trainer: type[PPOTrainer]) -> None:
    stage = Stage()

    def fail(count: int) -> None:
        stage.publisher.failure = RoleError("no server confirmed version 1")
        stage.pipe.empty_from = 1

    stage.engine.on_update = fail
    with pytest.raises(RoleError, match="no server confirmed version 1"):
        trainer(config(), stage.components()).train()
    assert "publisher closed" in stage.events.words
    assert not any(word.startswith("finish") for word in stage.events.words)


@BOTH
def test_failed_fetch_stops_the_run(config: MakeConfig, trainer: type[PPOTrainer]) -> None:
    stage = Stage()
    stage.pipe.empty_from = 1
    stage.pipe.failure = RoleError("the datapipe has been silent for 10 s")
    with pytest.raises(RoleError, match="silent for 10 s"):
        trainer(config(), stage.components()).train()
    assert "publisher closed" in stage.events.words
    assert not any(word.startswith("finish") for word in stage.events.words)


@BOTH
def test_error_while_closing_does_not_hide_the_first_error(
    config: MakeConfig, trainer: type[PPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage()
    stage.pipe.empty_from = 1

    def fail(what: str) -> None:
        raise RuntimeError(what)

    monkeypatch.setattr(stage.logger, "close", lambda: fail("no space left"))
    stage.engine.on_update = lambda count: fail("a broken update")
    made = trainer(config(), stage.components())
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match="a broken update"):
        made.train()
    assert "publisher closed" in stage.events.words
    assert signal.getsignal(signal.SIGTERM) != before


def test_failed_update_cancels_the_running_publish_and_fetch(config: MakeConfig) -> None:
    before, stage = set(threading.enumerate()), Stage()
    stage.pipe.empty_from = 2

    def on_update(count: int) -> None:
        if count == 1:
            stage.publisher.gate.clear()
        else:
            assert stage.pipe.waiting.wait(60.0)
            raise RuntimeError("a broken update")

    stage.engine.on_update = on_update
    with pytest.raises(RuntimeError, match="a broken update"):
        AsyncPPOTrainer(config(), stage.components()).train()
    stage.events.order("ask 2", "publisher closed")
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if name.startswith(("fetch", "publish"))]


@BOTH
def test_rank_stops_if_another_rank_has_no_batch(
    config: MakeConfig, trainer: type[PPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from arealite.impl.trainer.rank_group import World

    answers = iter([True, False])
    monkeypatch.setattr(World, "all", lambda self, flag: next(answers))
    stage = Stage()
    trainer(config(), stage.components()).train()
    assert stage.engine.updates == 1
    stage.events.order("report 0", "save step-000001", "finish: asked to stop")


@BOTH
def test_unusable_batch_is_set_aside_and_requested_again(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    stage = Stage()
    stage.pipe.garbled = [1, 1]
    trainer(config(), stage.components()).train()
    words = [w for w in stage.events.words if w.startswith(("ask", "set", "report"))]
    assert words.count("set aside 1: b") == 2 and words.count("ask 1") == 3
    assert words.index("ask 2") > words.index("set aside 1: b"), "never a batch ahead of it"
    assert stage.engine.updates == 3


@BOTH
def test_batch_that_stays_unusable_stops_the_run(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    stage = Stage()
    stage.pipe.garbled = [0] * 99
    with pytest.raises(InvariantError, match="batch 0 could not be trained 10 times"):
        trainer(config(), stage.components()).train()
    assert stage.engine.updates == 0


@pytest.mark.parametrize("trainer", [PPOTrainer, AsyncPPOTrainer])
def test_stale_server_is_updated_during_a_wait_for_a_batch(
    config: MakeConfig, trainer: type[PPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ppo, "SLICE_S", 0.01)
    stage = Stage()
    stage.pipe.empty_from = 1

    def starve(count: int) -> None:
        stage.publisher.is_stale = True

    def fed() -> None:
        stage.publisher.is_stale = False
        stage.pipe.empty_from = None

    stage.engine.on_update, stage.publisher.on_second_push = starve, fed
    staleness = 0 if trainer is PPOTrainer else 1
    trainer(config(total_steps=2, max_staleness=staleness), stage.components()).train()
    pushes = [word for word in stage.events.words if word.startswith("push")]
    assert pushes == ["push 0", "push 1", "push 1", "push 2"]
    assert stage.publisher.weights[1] == 1.0, "the same weights again"


def test_all_ranks_republish_together_however_long_each_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank has its batch at once; both ranks run equally many collectives and updates."""
    monkeypatch.setattr(ppo, "SLICE_S", 0.01)
    barrier, flags = threading.Barrier(2, timeout=60.0), [dict[str, float](), dict[str, float]()]

    class Pair(World):
        def max(self, values: dict[str, float]) -> dict[str, float]:
            flags[self.rank] = values
            barrier.wait()
            both = {name: max(each[name] for each in flags) for name in values}
            barrier.wait()
            return both

    healed, answers = [0, 0], [Future[str](), Future[str]()]
    answers[1].set_result("batch of rank 1")

    class Rank(PPOTrainer):
        def __init__(self, rank: int) -> None:
            self.world = Pair(rank=rank, size=2)

        @property
        def needs_republish(self) -> bool:
            return self.world.is_rank0 and healed[0] < 2

        def republish(self) -> None:
            healed[self.world.rank] += 1
            barrier.wait()
            if self.world.is_rank0 and healed[0] == 2:
                answers[0].set_result("batch of rank 0")

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda rank: Rank(rank).wait_on_all_ranks(answers[rank]), (0, 1)))
    assert got == ["batch of rank 0", "batch of rank 1"]
    assert healed == [2, 2]


# ---------------------------------------------------------------- critic, reference, epochs

GAE = AdvantageConfig(type="gae")


def test_step_with_critic_and_reference_has_this_order_of_operations(config: MakeConfig) -> None:
    stage = Stage(actors=["critic", "reference"])
    kl = KLConfig(coef=0.1, reference="initial")
    PPOTrainer(config(total_steps=1, advantage=GAE, kl=kl), stage.components()).train()
    step = stage.events.words[stage.events.words.index("ask 0") :]
    assert step == [
        *("ask 0", "reference forward", "critic forward"),
        *("update 1", "critic update 1", "report 0", "gather", "push 1", "published 1"),
        *("save step-000001", "critic save step-000001", "checkpointed 1"),
        *("export", "finish: all steps are trained", "publisher closed"),
    ]
    (report,) = stage.pipe.reports
    assert report.fingerprint == f"{1:016x}" * 2, "a step is as equal as both of its models"
    assert report.metrics["critic/lr"] == 1e-3
    assert "policy/reference_kl" in report.metrics


def test_epochs_repeat_updates_with_one_proximal_policy(config: MakeConfig) -> None:
    stage = Stage(minibatches=2, actors=["critic"])
    PPOTrainer(
        config(total_steps=1, updates=2, epochs=3, advantage=GAE), stage.components()
    ).train()
    assert stage.engine.updates == stage.others["critic"].updates == 6
    assert stage.events.words.count("forward") == stage.events.words.count("critic forward") == 1
    assert stage.pipe.reports[0].metrics["update/count"] == 6


@BOTH
def test_critic_checkpoints_are_saved_and_deleted_with_the_policys(
    config: MakeConfig, trainer: type[PPOTrainer]
) -> None:
    keep = CheckpointConfig(every_steps=1, keep=2, export=False)
    made = config(total_steps=4, advantage=GAE, checkpoint=keep)
    first = Stage(actors=["critic"])
    trainer(made, first.components()).train()
    paths = run_paths(made)
    assert parts_of_checkpoints(paths) == {"step-000003": ["critic"], "step-000004": ["critic"]}
    # A kill between the two saves of step 5 leaves no valid checkpoint of step 5.
    late = ScriptedEngine(Events())
    late.updates = 99
    late.save(checkpoint.begin(paths.checkpoints / "step-000005"), {"step": 5})
    again = Stage(actors=["critic"])
    more = replace(made.trainer.ppo, total_steps=6)
    trainer(replace(made, trainer=TrainerConfig(ppo=more)), again.components()).train()
    again.events.order("load step-000004", "critic load step-000004", "start 4", "critic update 5")
    assert again.others["critic"].updates == 6
    assert parts_of_checkpoints(paths) == {"step-000005": ["critic"], "step-000006": ["critic"]}


def parts_of_checkpoints(paths: RunPaths) -> dict[str, list[str]]:
    """Return the folders inside each good checkpoint."""
    good = checkpoint.list_good(paths.checkpoints)
    return {path.name: [each.name for each in path.iterdir() if each.is_dir()] for path in good}


def test_run_without_a_critic_cannot_resume_with_a_critic(config: MakeConfig) -> None:
    PPOTrainer(config(total_steps=1), Stage().components()).train()
    with pytest.raises(UserError, match=r"step-000001.*has no critic.*resume=never"):
        PPOTrainer(
            config(total_steps=2, advantage=GAE), Stage(actors=["critic"]).components()
        ).train()
