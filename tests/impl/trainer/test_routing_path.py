"""Experts of a mixture on their path: server, client, turns, segments, payload, rows, trainer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch.distributed as dist

from arealite.api.agent import Agent
from arealite.api.episode import Action, Seat
from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.llm import LLMClientConfig, SamplingConfig
from arealite.api.rollout_messages import Lease
from arealite.api.task import Task
from arealite.api.trainer_messages import Batch
from arealite.api.trajectory import TrajectoryHeader
from arealite.api.turns import decode_turn, encode_turn
from arealite.ext.models.expert_routing import Routing
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.rollout.collector import make_trajectory, tree_of
from arealite.impl.trainer.batch import TrainBatch, make_train_batch
from arealite.system.ledger.payload_checks import find_mismatch
from tests.fakes.embedded import running, server_config
from tests.impl.engine.helpers import gradients, make_engine
from tests.models import tiny_mixture
from tests.payloads import decode_segments

SAMPLING = SamplingConfig(max_new_tokens=12)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Talker(Agent):
    """Plays three turns: the second extends the first, the third forks from it."""

    async def act(self, observation: object) -> Action:
        first = [5, 6, 7, 8]
        answer = await self.generate(first, sampling=SAMPLING)
        for question in ([9, 10, 11], [12, 13]):
            prompt = first + answer.output_ids + question
            await self.generate(prompt, sampling=SAMPLING)
        return Action("")


def settings(model: Path, names: Path, routing: Any) -> ExperimentConfig:
    served = server_config(model, names)
    config = ExperimentConfig(
        cluster=served.cluster, model=ModelConfig(path=str(model)), server_wait_s=60.0
    )
    ppo = config.trainer.ppo
    ppo = dataclasses.replace(ppo, collector=dataclasses.replace(ppo.collector, routing=routing))
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, ppo=ppo))


async def play(config: ExperimentConfig, *, is_paused: bool) -> tuple[Agent, Any]:
    """Play one episode on an embedded server; `is_paused`: it recomputes the first answer."""
    async with running(server_config(config.model.path or "", config.cluster.name_root)) as server:
        client = ServersClient(config, LLMClientConfig())
        await client.start()
        agent = Talker(None, client=client, tokenizer=None, seat=Seat())  # type: ignore[arg-type]
        playing = asyncio.create_task(agent.act(None))
        if is_paused:
            while not server.engine.decoder.running and not playing.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.wrap_future(server.pause("retract"))
            await asyncio.wrap_future(server.engine.call(server.engine.resume))
        await playing
        await client.close()
    lease = Lease(
        lease_id="l",
        group_id="g",
        split="train",
        task=Task(task_id="t", prompt="", ground_truth=None, extra_info={}),
        members=[0],
        version=0,
    )
    return agent, make_trajectory(lease, 0, agent, tree_of(agent), seconds=1.0)


def rows_of(header: TrajectoryHeader, payload: bytes, config: ExperimentConfig) -> TrainBatch:
    batch = Batch(step=0, headers=[header], ranks=[0], minibatches=[0], mine=[0], waits={})
    return make_train_batch(batch, [payload], config.trainer.ppo, rank=0, world_size=1)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("count", "is_paused"), [(4, False), (4, True), (300, False)])
async def test_trainer_replays_every_token_of_a_branched_episode(
    tmp_path: Path, count: int, is_paused: bool
) -> None:
    model = tiny_mixture(tmp_path / "model", "qwen3_moe", num_experts=count)
    config = settings(model, tmp_path / "names", "replay")
    agent, (header, payload) = await play(config, is_paused=is_paused)
    assert find_mismatch(header, payload) == ""
    segments, width = decode_segments(payload), 1 if count < 256 else 2
    assert len(segments) == 2
    for segment in segments:
        record = np.frombuffer(segment.routing, f"<u{width}")
        record = record.reshape(len(segment.loss_mask), 2, 2)
        assert record[:-1].max() < count and (record[-1] == np.iinfo(record.dtype).max).all()
    stored = decode_turn(encode_turn(agent.record.turns[1]))
    assert stored.response.routing == agent.record.turns[1].response.routing != b""
    batch = rows_of(header, payload, config)
    engine = make_engine(model)
    found = engine.forward(batch.rows)["logprobs"]
    for row, logprobs in zip(batch.rows, found, strict=True):
        behaviour = row.fields["behav_logprobs"]
        np.testing.assert_allclose(logprobs, np.where(row.loss_mask, behaviour, 0), atol=1e-5)
        row.fields |= {name: behaviour for name in ("prox_logprobs", "advantages")}
    stats = gradients(engine, batch.rows)[1]
    # The branches share tokens, which are compared once.
    assert stats["computed_tokens"] < sum(len(row.tokens) - 1 for row in batch.rows)
    assert stats["routing_matched"] == stats["routing_compared"] == 2 * stats["computed_tokens"]


async def test_missing_record_is_reported_once_and_routes_freely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_mixture(tmp_path / "model", "qwen3_moe")
    config = settings(model, tmp_path / "names", "replay")
    monkeypatch.setattr(Routing, "of", lambda model: None)  # as SGLang without its flag
    with structlog.testing.capture_logs() as logs:
        _, (header, payload) = await play(config, is_paused=False)
    told = [each for each in logs if each["event"] == "server reports no experts"]
    assert len(told) == 1 and "--enable-return-routed-experts; else use" in told[0]["fix"]
    assert all(row.routing is None for row in rows_of(header, payload, config).rows)


@pytest.mark.usefixtures("group")
async def test_no_record_is_requested_with_routing_ignored(tmp_path: Path) -> None:
    model = tiny_mixture(tmp_path / "model", "qwen3_moe")
    config = settings(model, tmp_path / "names", "ignore")
    _, (header, payload) = await play(config, is_paused=False)
    assert [segment.routing for segment in decode_segments(payload)] == [b"", b""]
    assert all(row.routing is None for row in rows_of(header, payload, config).rows)
