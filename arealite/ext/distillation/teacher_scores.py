"""Scores of the teacher: the worker adds them to finished trajectories.

A score is the teacher's log-probability of a token that the policy sampled, float32. It is stored
in the ledger with the trajectory, so a replay needs no teacher.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count

import msgspec
import numpy as np

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import TreeChange
from arealite.api.llm import LLMClient, LLMRequest, LLMResponse, SamplingConfig, clients
from arealite.api.server_protocol import TopRow
from arealite.api.task import Task
from arealite.api.trajectory import TurnNode
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.api.turns import digest_of_answer, pack
from arealite.base.errors import EpisodeError
from arealite.ext.distillation.config import DistillationConfig
from arealite.ext.distillation.teacher_trial import options_of, teacher_trials

FIELD = "teacher_logprobs"
"""The name of the scores in `TurnNode.extras`."""
TOP_IDS = "teacher_top_ids"
"""The name of the teacher's most probable tokens there, int32 [N, top_k]; -1: no further token."""
TOP_LOGPROBS = "teacher_top_logprobs"
"""The name of their scores, or with top_k_of=policy of those of the turn's `top_ids`, float32
[N, top_k]; -inf: no token."""
LOWEST = -100.0
"""A token that the teacher cannot say gets this score instead of minus infinity."""


def scorer(config: ExperimentConfig) -> AbstractAsyncContextManager[TreeChange] | None:
    """Return the teacher's scorer; None without a teacher. Hook `tree_change`."""
    return running(config) if options_of(config.trainer.ppo).is_on else None


@asynccontextmanager
async def running(config: ExperimentConfig) -> AsyncIterator[TreeChange]:
    """Connect to the teacher's servers; give what adds their scores to a tree."""
    client_config = config.trainer.ppo.collector.client
    client_by_source = dict[str, LLMClient]()
    async with AsyncExitStack() as stack:
        for source, trial in teacher_trials(config).items():
            client = clients.get(client_config.type)(trial, client_config)
            await client.start()
            stack.push_async_callback(client.close)
            client_by_source[source] = client
        yield Scorer(client_by_source, options_of(config.trainer.ppo)).add_scores


class Scorer:
    """Asks teachers for scores."""

    def __init__(
        self, client_by_source: Mapping[str, LLMClient], options: DistillationConfig
    ) -> None:
        self._clients = client_by_source
        self._options = options
        self._numbers = count()

    async def add_scores(self, task: Task, tree: TrajectoryTree) -> TrajectoryTree:
        """Return the tree with the score of each sampled token.

        Raises:
            EpisodeError: The teacher did not answer in time, or refused the tokens.
        """
        turns = [*tree.turns]
        for path in tree.paths:
            last = path[-1]
            raw_ids = tree.tokens(last, tree.ends[last])
            ids = array("i", raw_ids).tolist()
            target_ids = self._target_ids(tree, path)
            response = await self._scored(task.source, ids, target_ids)
            target_logprobs = np.frombuffer(response.target_logprobs, "<f4")
            for index in path:
                # The first token has no score, so scores[i] belongs to ids[i + 1].
                begin = tree.starts[index] - 1
                end = tree.ends[index] - 1
                scores = response.prompt_logprobs[begin:end]
                finite_scores = [max(score, LOWEST) for score in scores]
                values = {FIELD: pack("f", finite_scores)}
                if target_ids:
                    span = slice(begin * self._options.top_k, end * self._options.top_k)
                    values[TOP_LOGPROBS] = target_logprobs[span].tobytes()
                elif self._options.top_k:
                    rows = response.prompt_top_tokens[begin:end]
                    values |= self._top(rows)
                turns[index] = with_values(turns[index], values)
        return TrajectoryTree(tree.prompt, turns)

    def _target_ids(self, tree: TrajectoryTree, path: Sequence[int]) -> list[list[int]]:
        """Return the sampler's most probable tokens at each place [T - 1][K]; [] without them.

        Raises:
            EpisodeError: An agent's own request did not record them.
        """
        top_k = self._options.top_k
        if self._options.top_k_of == "teacher":
            return []
        target_ids_TK = np.full((tree.ends[path[-1]] - 1, top_k), -1, np.int32)
        for index in path:
            turn = tree.turns[index]
            top_ids = np.frombuffer(turn.extras.get("top_ids", b""), "<i4")
            if len(top_ids) * 4 != top_k * len(turn.ids):
                raise EpisodeError(
                    "distillation.top_k_of=policy needs the sampler's top_k most probable tokens "
                    "of each answer. Leave top_logprobs out of the agent's own requests."
                )
            span = slice(tree.starts[index] - 1, tree.ends[index] - 1)
            target_ids_TK[span] = top_ids.reshape(-1, top_k)
        return target_ids_TK.tolist()

    async def _scored(
        self, source: str, ids: list[int], target_ids: list[list[int]]
    ) -> LLMResponse:
        """Return the answer of a source's teacher, with the scores of tokens."""
        number = next(self._numbers)
        num_top = 0 if target_ids else self._options.top_k
        request = LLMRequest(
            request_id=f"{FIELD}/{number}",
            group_id=f"{FIELD}/{number}",
            input_ids=ids,
            sampling=SamplingConfig(max_new_tokens=1, top_logprobs=num_top),
            deadline_s=self._options.timeout_s,
            scores_prompt=True,
            target_ids=target_ids,
        )
        client = self._clients.get(source) or self._clients[""]
        return await client.generate(request)

    def _top(self, rows: Sequence[TopRow]) -> dict[str, bytes]:
        """Return ids and logprobs of the teacher's `top_k` most probable tokens at each place."""
        top_k = self._options.top_k
        ids = array("i")
        logprobs = array("f")
        for row in rows:
            pairs = [(logprob, token) for logprob, token, _ in row if logprob is not None]
            pairs.sort(reverse=True)
            pairs += [(-math.inf, -1)] * top_k
            for logprob, token in pairs[:top_k]:
                ids.append(token)
                logprobs.append(logprob)
        return {TOP_IDS: ids.tobytes(), TOP_LOGPROBS: logprobs.tobytes()}


def with_values(turn: TurnNode, values: Mapping[str, bytes]) -> TurnNode:
    """Return a turn with further values of its sampled tokens."""
    extras = {**turn.extras, **values}
    answer_digest = digest_of_answer(turn.ids, turn.logprobs, turn.versions, extras)
    return msgspec.structs.replace(turn, extras=extras, answer_digest=answer_digest)
