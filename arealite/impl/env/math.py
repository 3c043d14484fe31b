"""The built-in environment: one question, one answer, one reward.

The shortest environment there is, and the one to copy for a new one.
"""

from __future__ import annotations

import time

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.reward import RewardFactory
from arealite.api.task import Task
from arealite.base.errors import EpisodeError


class MathEnv(Env):
    """Scores an agent's answer against the task's ground truth."""

    resumable = True

    async def setup(self) -> None:
        """Start the reward function."""
        self.scorer = RewardFactory(self.args).make_reward(self.config.reward)
        await self.scorer.setup()

    async def run(self, task: Task, **agents: Agent) -> None:
        """Let the agent answer, and reward it; an answer cut at its limit is scored as it is.

        Raises:
            EpisodeError: the task has no ground truth.
        """
        agent = agents["agent"]
        if task.ground_truth is None:
            raise EpisodeError(f"{task.task_id} has no ground_truth; env.type=math needs one a row")
        action = await agent.act(task.prompt)
        begin = time.perf_counter()
        score = await self.scorer.score(action.text, task.ground_truth)
        agent.record.seconds_scoring += time.perf_counter() - begin
        agent.reward(score)

    async def close(self) -> None:
        """Stop the reward function."""
        await self.scorer.close()
