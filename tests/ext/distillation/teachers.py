"""Fake teachers, and configs of runs with them."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.api.llm import LLMRequest, LLMResponse, clients
from arealite.ext.distillation.config import DistillationConfig
from arealite.impl.rollout.collector import Collector
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, tokenizer
from tests.impl.rollout import worlds  # registers the environments

assert worlds
FACTS = RunFacts(model={}, shapes={}, free_bytes=0)
OPTIONS = DistillationConfig(teacher="/teacher")


def score(ids: list[int], place: int) -> float:
    """Return the fake teacher's logprob of a token: it depends on place and prefix."""
    return -math.log(2 + ids[place] + 0.1 * place + 0.01 * sum(ids[:place]))


def teacher(request: LLMRequest) -> LLMResponse:
    assert request.scores_prompt
    ids = request.input_ids
    answer = response([1])
    return replace_logprobs(answer, [score(ids, place) for place in range(1, len(ids))])


def replace_logprobs(answer: LLMResponse, logprobs: list[float]) -> LLMResponse:
    return msgspec.structs.replace(answer, prompt_logprobs=logprobs)


class TeacherClient(ScriptedClient):
    """The client that the registry gives for the teacher's trial."""

    trials: ClassVar[list[str]] = []

    def __init__(self, args, config) -> None:
        super().__init__(teacher)
        self.trials.append(args.trial_name)


clients.register("fake_teacher")(TeacherClient)


def distilled(env: str = "world", **options):
    """Return a config with the fake teacher."""
    config = experiment(env)
    ppo = config.trainer.ppo
    client = replace(ppo.collector.client, type="fake_teacher")
    ppo = replace(
        ppo,
        collector=replace(ppo.collector, client=client),
        distillation=replace(OPTIONS, **options),
    )
    return replace(config, trainer=replace(config.trainer, ppo=ppo))


@asynccontextmanager
async def collector(config, script):
    made = Collector(config, ScriptedClient(script), tokenizer())
    await made.setup()
    try:
        yield made
    finally:
        await made.close()


class Alone:
    """One rank."""

    def add(self, numbers: np.ndarray) -> np.ndarray:
        return numbers


def run_of(policy: Path, teacher: Path, **options) -> ExperimentConfig:
    config = experiment()
    ppo = replace(
        config.trainer.ppo, distillation=DistillationConfig(teacher=str(teacher), **options)
    )
    trainer = replace(config.trainer, ppo=ppo)
    return replace(config, model=replace(config.model, path=str(policy)), trainer=trainer)
