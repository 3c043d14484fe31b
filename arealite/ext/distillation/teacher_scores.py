"""Scores of the teacher: the worker adds them to finished trajectories.

A score is the teacher's log-probability of a token that the policy sampled, float32. It is stored
in the ledger with the trajectory, so a replay needs no teacher.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count

import msgspec

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import TreeChange
from arealite.api.llm import LLMClient, LLMRequest, SamplingConfig, clients
from arealite.api.task import Task
from arealite.api.trajectory import TurnNode
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.api.turns import digest_of_answer, pack
from arealite.ext.distillation.config import DistillationConfig
from arealite.ext.distillation.teacher_trial import options_of, teacher_trial

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
