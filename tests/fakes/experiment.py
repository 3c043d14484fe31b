"""Small experiment configs and leases, for tests of collector, worker, agents and environments."""

from __future__ import annotations

from functools import cache
from typing import Any

from arealite.api.collector_config import AgentConfig, CollectorConfig, MathCodeSingleStepConfig
from arealite.api.env import EnvConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import SamplingConfig
from arealite.api.rollout_messages import Lease
from arealite.api.task import Task
from arealite.api.trainer import EvalConfig, PPOConfig, TrainerConfig

PLAIN = MathCodeSingleStepConfig(use_chat_template=False)
"""Sends texts as they are: an observation can be the tokens so far."""


@cache
def tokenizer() -> Any:
    """Return the character tokenizer, made once."""
    from tests.models import tiny_tokenizer

    return tiny_tokenizer()


def experiment(
    env: str = "math", agent: str = "math_code_single_step", **collector: Any
) -> ExperimentConfig:
    """Return a config with one environment and one agent; greedy in evaluation."""
    own = CollectorConfig(
        env=EnvConfig(type=env),
        agent=AgentConfig(type=agent, math_code_single_step=PLAIN),
        **{"concurrency": 8, "sampling": SamplingConfig(max_new_tokens=8)} | collector,
    )
    evaluation = EvalConfig(sampling=SamplingConfig(temperature=0.0, max_new_tokens=8))
    return ExperimentConfig(trainer=TrainerConfig(ppo=PPOConfig(collector=own, eval=evaluation)))


def lease(
    number: int = 0,
    *,
    members: int = 1,
    split: str = "train",
    prompt: Any = "1+1=",
    ground_truth: str | None = "2",
    version: int = 0,
) -> Lease:
    """Return a lease of the group `g<number>`."""
    task = Task(
        task_id=f"{split}-{number}", prompt=prompt, ground_truth=ground_truth, extra_info={}
    )
    return Lease(
        lease_id=f"l{number}",
        group_id=f"g{number}",
        split=split,
        task=task,
        members=list(range(members)),
        version=version,
    )
