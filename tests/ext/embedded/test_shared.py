"""The trainer's process serves its parameters; each turn has one version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from arealite.api.engine import Sequence
from arealite.api.engine_config import LoRAConfig
from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.publisher import PublisherConfig
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.base.errors import RoleError, UserError
from arealite.ext.embedded.shared_publisher import SharedPublisher
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.embedded import Brake
from tests.impl.engine.helpers import loss_of, make_engine, make_rows
from tests.models import tiny_model
from tests.waiting import eventually

PROMPT = [*range(5, 25)]  # longer than MIN_PREFIX_TOKENS, so that its beginning is kept


class Pair:
    """An engine and a publisher that serves its parameters."""

    def __init__(self, folder: Path, config: PublisherConfig, **options: Any) -> None:
        self.config = ExperimentConfig(
            cluster=ClusterConfig(
                name_root=str(folder / "names"), run_root=str(folder), security=False
            ),
            model=ModelConfig(path=str(tiny_model(folder / "model", init_std=0.1))),
            trainer=TrainerConfig(ppo=PPOConfig(publisher=config)),
        )
        self.engine: FSDPEngine = make_engine(Path(self.config.model.path), **options)
        self.publisher = SharedPublisher(self.config, self.engine)
        self.url = self.publisher.server.address

    def learn(self) -> None:
        """Update the parameters as a trainer does."""
        rows = make_rows()
        stats = self.engine.train_batch(rows, loss_of(self.engine))
        assert stats["grad_norm"] > 0

    def release(self, version: int) -> None:
        copies = self.engine.stream_weights()
        assert self.publisher.stage(version, copies) is False
        assert next(copies, None) is not None, "nothing was copied"

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """Return the engine's log-probabilities of an answer to PROMPT."""
        whole = np.array(PROMPT + tokens, np.int32)
        mask = np.arange(len(whole)) >= len(PROMPT)
        row = Sequence(tokens=whole, loss_mask=mask, temperature=1.0, fields={})
        return self.engine.forward([row])["logprobs"][0][len(PROMPT) :]


async def ask(url: str, *, count: int = 16) -> dict[str, Any]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": count, "ignore_eos": True},
        "return_logprob": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/generate", json=body) as got,
    ):
        assert got.status == 200, await got.text()
        return (await got.json())["meta_info"]


def spans(meta: dict[str, Any]) -> list[str]:
    return [span["version"] for span in meta["weight_versions"]]


@pytest.fixture
def pair(group: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    options = dict(getattr(request, "param", {}))
    mode = options.pop("pause_mode", "retract")
    made = Pair(
        tmp_path, PublisherConfig(type="shared", pause_mode=mode, timeout_s=120.0), **options
    )
    yield made
    made.publisher.close()
    assert not NameRegistry.of(made.config).list("llm_server"), "it left its name"


KINDS = {
    "plain": {},
    "packed": {"layout": "packed"},
    "in place": {"pause_mode": "in_place"},
    "recomputed": {"gradient_checkpointing": True},
    "lora": {"lora": LoRAConfig(rank=4)},
    "lora, low": {"lora": LoRAConfig(rank=4), "dtype": "bfloat16"},
}


@pytest.mark.parametrize("pair", KINDS.values(), ids=KINDS, indirect=True)
async def test_generation_uses_the_current_trained_parameters(pair: Pair) -> None:
    names = NameRegistry.of(pair.config).list("llm_server")
    assert [entry.value["type"] for entry in names] == ["shared"]
    close = 2e-5 if pair.engine.dtype == torch.float32 else 0.05
    told = []
    for version in range(3):
        await asyncio.to_thread(pair.release, version)
        meta = await ask(pair.url)
        assert spans(meta) == [str(version)]
        logprobs, tokens = zip(
            *((lp, t) for lp, t, _ in meta["output_token_logprobs"]), strict=True
        )
        await asyncio.to_thread(pair.publisher.pause_generation)
        np.testing.assert_allclose(logprobs, pair.logprobs(list(tokens)), atol=close)
        told.append(pair.logprobs(PROMPT))
        pair.learn()
    assert np.abs(told[2] - told[0]).max() > 1e-3, "the policy did not change"


async def test_running_generation_pauses_for_an_update_and_continues(pair: Pair) -> None:
    early = asyncio.create_task(ask(pair.url))
    await asyncio.to_thread(pair.release, 0)
    assert spans(await early) == ["0"], "it was held until the first version"
    engine = pair.publisher.server.engine
    brake = Brake(engine)
    brake.block()
    long = asyncio.create_task(ask(pair.url, count=400))
    await eventually(lambda: [each for each in engine.decoder.running if each.output], "a token")
    await asyncio.to_thread(pair.publisher.pause_generation)
    brake.release()
    held_at = time.perf_counter()
    held = asyncio.create_task(ask(pair.url))
    pair.learn()
    learned_s = time.perf_counter() - held_at
    assert not long.done()
    assert not held.done()
    await asyncio.to_thread(pair.release, 1)
    assert spans(await long) == ["0", "1"]
    assert spans(await held) == ["1"]
    report = pair.publisher.push(1)
    assert (report.version, report.servers, report.num_bytes) == (1, 1, 0)
    assert report.stall_s >= learned_s and report.pause_s > 0


async def test_admin_routes_of_the_shared_server_return_404(pair: Pair) -> None:
    paths = ["pause_generation", "continue_generation", "update_weights_from_disk", "flush_cache"]
    async with aiohttp.ClientSession() as session:
        for path in paths:
            async with session.post(f"{pair.url}/{path}", json={"mode": "abort"}) as answer:
                assert answer.status == 404, path


async def test_engine_crash_raises_an_error_in_the_trainer(pair: Pair) -> None:
    engine = pair.publisher.server.engine

    def die() -> None:
        raise MemoryError("no memory")

    assert pair.publisher.needs_republish is False
    engine._post(die)
    with pytest.raises(RoleError, match="the engine crashed: no memory"):
        await asyncio.to_thread(pair.publisher.pause_generation)
    with pytest.raises(RoleError, match="no memory"):
        _ = pair.publisher.needs_republish


def test_unsupported_model_is_a_user_error(pair: Pair, monkeypatch: Any) -> None:
    pair.engine.module.set_attn_implementation("sdpa")
    monkeypatch.setattr(pair.engine.module.config, "layer_types", ["linear_attention"])
    config = replace(pair.config, trial_name="other")
    with pytest.raises(
        UserError, match="cannot run Qwen2ForCausalLM: KeyError: 'linear_attention'"
    ):
        SharedPublisher(config, pair.engine)
    assert not NameRegistry.of(config).list("llm_server")


def test_sharded_parameters_are_refused(group: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one trainer rank"):
        Pair(tmp_path, PublisherConfig(type="shared"), dtype="bfloat16")
