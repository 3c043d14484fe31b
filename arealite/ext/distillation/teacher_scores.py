"""Scores of the teacher: the worker adds them to finished trajectories, the trainer uses them.

A score is the teacher's log-probability of a token that the policy sampled, float32. It is stored
in the ledger with the trajectory, so a replay needs no teacher.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import msgspec
import numpy as np

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import AdvantageChange, StepMetrics, TreeChange
from arealite.api.llm import LLMClient, LLMRequest, SamplingConfig, clients
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig
from arealite.api.trajectory import TurnNode
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.api.turns import digest_of_answer, pack
from arealite.ext.distillation.config import DistillationConfig
from arealite.ext.distillation.teacher import options_of, teacher_trial
from arealite.impl.trainer.batch import TrainBatch, Trajectory
from arealite.impl.trainer.rank_group import World

FIELD = "teacher_logprobs"
"""The name of the scores in `TurnNode.extras`."""
LOWEST = -100.0
"""A token that the teacher cannot say gets this score instead of minus infinity."""


def scorer(config: ExperimentConfig) -> AbstractAsyncContextManager[TreeChange] | None:
    """Return the teacher's scorer; None without a teacher. Hook `tree_change`."""
    return running(config) if options_of(config.trainer.ppo).is_on else None


@asynccontextmanager
async def running(config: ExperimentConfig) -> AsyncIterator[TreeChange]:
    """Connect to the teacher's servers; give what adds their scores to a tree."""
    client_config = config.trainer.ppo.collector.client
    client = clients.get(client_config.type)(teacher_trial(config), client_config)
    await client.start()
    try:
        yield Scorer(client, options_of(config.trainer.ppo)).add_scores
    finally:
        await client.close()


class Scorer:
    """Asks the teacher for scores."""

    def __init__(self, client: LLMClient, options: DistillationConfig) -> None:
        self._client = client
        self._options = options
        self._numbers = count()

    async def add_scores(self, _: Task, tree: TrajectoryTree) -> TrajectoryTree:
        """Return the tree with the score of each sampled token.

        Raises:
            EpisodeError: The teacher did not answer in time, or refused the tokens.
        """
        turns = [*tree.turns]
        for path in tree.paths:
            last = path[-1]
            ids = array("i", tree.tokens(last, tree.ends[last])).tolist()
            scores = await self._scores(ids)
            for index in path:
                # The first token has no score, so scores[i] belongs to ids[i + 1].
                turn_scores = scores[tree.starts[index] - 1 : tree.ends[index] - 1]
                turns[index] = with_scores(turns[index], turn_scores)
        return TrajectoryTree(tree.prompt, turns)

    async def _scores(self, ids: list[int]) -> list[float]:
        """Return the teacher's logprobs of the tokens but the first one."""
        number = next(self._numbers)
        request = LLMRequest(
            request_id=f"{FIELD}/{number}",
            group_id=f"{FIELD}/{number}",
            input_ids=ids,
            sampling=SamplingConfig(max_new_tokens=1),
            deadline_s=self._options.timeout_s,
            scores_prompt=True,
        )
        response = await self._client.generate(request)
        return response.prompt_logprobs


def with_scores(turn: TurnNode, scores: Sequence[float]) -> TurnNode:
    """Return a turn with a score for each of its sampled tokens."""
    finite_scores = [max(score, LOWEST) for score in scores]
    extras = {**turn.extras, FIELD: pack("f", finite_scores)}
    answer_digest = digest_of_answer(turn.ids, turn.logprobs, turn.versions, extras)
    return msgspec.structs.replace(turn, extras=extras, answer_digest=answer_digest)


def distillation(config: PPOConfig) -> AdvantageChange | None:
    """Return what adds the scores to advantages; None without. Hook `advantage_change`."""
    options = options_of(config)
    return partial(with_teacher, options) if options.is_on else None


def with_teacher(
    options: DistillationConfig, trajectory: Trajectory, advantages: np.ndarray | float
) -> np.ndarray | float:
    """Return advantages with coef · (log π_teacher − log π_behav) of each sampled token [N].

    In expectation this is −coef times the reverse KL divergence of the token (sampled reverse KL,
    without a discount: each token answers for itself). A trajectory without scores, from before
    the option was set, keeps its advantages.
    """
    kl_N = reverse_kl(trajectory)
    if kl_N is None or not trajectory.is_scored:
        return advantages
    reward_part = 0.0 if options.only else advantages
    return reward_part - options.coef * kl_N


def reverse_kl(trajectory: Trajectory) -> np.ndarray | None:
    """Return log π_behav − log π_teacher of each sampled token, float64 [N]; None: no scores."""
    raw_scores = b""
    for segment in trajectory.segments:
        for turn in segment.turns:
            if FIELD not in turn.node.extras:
                return None
            raw_scores += turn.node.extras[FIELD]
    teacher_N = np.frombuffer(raw_scores, "<f4")
    return trajectory.gather("behav_logprobs") - teacher_N


def metrics(config: ExperimentConfig, world: World) -> StepMetrics | None:
    """Return what measures the distance to the teacher. Hook `step_metrics`."""
    return partial(distance, world) if options_of(config.trainer.ppo).is_on else None


def distance(world: World, batch: TrainBatch, _: Any) -> Mapping[str, float]:
    """Return the mean of log π_behav − log π_teacher over the sampled tokens of all ranks."""
    sums = np.zeros(2)
    for trajectory in batch.local:
        kl_N = reverse_kl(trajectory)
        if kl_N is not None:
            sums += kl_N.sum(), len(kl_N)
    total, num_tokens = world.add(sums)
    return {"distillation/reverse_kl": float(total / max(num_tokens, 1.0))}
