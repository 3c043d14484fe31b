"""A teacher's scores: from its client into a tree, the ledger's payload, and the advantages."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from arealite.api.llm import LLMRequest, LLMResponse
from arealite.api.trainer import PPOConfig
from arealite.base.errors import ServerUnavailable
from arealite.ext.distillation.teacher_advantages import with_teacher
from arealite.ext.distillation.teacher_scores import FIELD, LOWEST, Scorer
from arealite.impl.trainer.batch import make_train_batch
from arealite.impl.trainer.batch_advantages import compute_advantages
from arealite.system.ledger.payload_checks import decode_checked
from tests.ext.distillation.teachers import (
    OPTIONS,
    Alone,
    TeacherClient,
    collector,
    distilled,
    replace_logprobs,
    score,
)
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease
from tests.impl.rollout import worlds  # registers the environments
from tests.impl.trainer.trajectories import batch


async def test_each_sampled_token_gets_the_score_of_its_place() -> None:
    config = distilled()
    async with collector(config, lambda request: response([10, 11, 12])) as made:
        episode, payloads = await made.run(lease(7), 0)
    tree, flaw = decode_checked(episode.headers[0], payloads[0])
    assert flaw == ""
    (turn,) = tree.turns
    ids = np.frombuffer(tree.tokens(0, tree.ends[0]), "<i4").tolist()
    expected = [score(ids, tree.starts[0] + i) for i in range(3)]
    assert np.frombuffer(turn.extras[FIELD], "<f4") == pytest.approx(expected, rel=1e-6)
    assert TeacherClient.trials[-1] == f"{config.trial_name}-teacher"


async def test_held_out_episodes_are_not_scored() -> None:
    async with collector(distilled(), lambda request: response([10])) as made:
        episode, payloads = await made.run(lease(7, split="eval"), 0)
    tree, _ = decode_checked(episode.headers[0], payloads[0])
    assert FIELD not in tree.turns[0].extras


async def test_episode_fails_if_the_teacher_does_not_answer() -> None:
    async with collector(distilled(), lambda request: response([10])) as made:
        (change,) = made._tree_changes
        change.__self__._clients[""].script = lambda request: ServerUnavailable("no teacher")
        episode, payloads = await made.run(lease(7), 0)
    assert episode.failure is not None and "no teacher" in episode.failure.detail
    assert not payloads


async def test_impossible_tokens_get_the_lowest_score() -> None:
    def never(request: LLMRequest) -> LLMResponse:
        return replace_logprobs(response([1]), [-math.inf] * (len(request.input_ids) - 1))

    async with collector(experiment("world"), lambda request: response([10])) as made:
        episode, payloads = await made.run(lease(7), 0)
    tree, _ = decode_checked(episode.headers[0], payloads[0])
    scored = await Scorer({"": ScriptedClient(never)}, OPTIONS).add_scores(lease(7).task, tree)
    assert np.frombuffer(scored.turns[0].extras[FIELD], "<f4").tolist() == [LOWEST]


async def test_scores_reach_the_advantages_through_the_payload() -> None:
    async with collector(distilled(), lambda request: response([10, 11, 12])) as made:
        played = [await made.run(lease(7, members=2), member) for member in range(2)]
    pairs = [(episode.headers[0], ()) for episode, _ in played]
    plan, _ = batch(pairs)
    payloads = [payload for _, (payload,) in played]
    for only, coef in ((True, 1.0), (False, 0.5)):
        ppo = replace(distilled(only=only, coef=coef).trainer.ppo, batch_size=2)
        made_batch = make_train_batch(plan, payloads, ppo, rank=0, world_size=1)
        compute_advantages(made_batch, ppo, Alone())  # type: ignore[arg-type]
        for trajectory in made_batch.local:
            (segment,) = trajectory.segments
            teacher_N = np.frombuffer(segment.turns[0].node.extras[FIELD], "<f4")
            advantages_N = trajectory.gather("advantages")
            # Equal rewards: the group's own advantage is 0.
            assert advantages_N == pytest.approx(coef * (teacher_N + 0.5), rel=1e-5)


async def test_trajectories_without_scores_keep_their_advantages() -> None:
    async with collector(experiment("world"), lambda request: response([10])) as made:
        episode, (payload,) = await made.run(lease(7), 0)
    plan, _ = batch([(episode.headers[0], ())])
    made_batch = make_train_batch(plan, [payload], PPOConfig(), rank=0, world_size=1)
    (trajectory,) = made_batch.local
    assert with_teacher(replace(OPTIONS, only=True), trajectory, 2.0) == 2.0


assert worlds
