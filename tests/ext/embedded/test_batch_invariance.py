"""With `batch_invariant`, a request gets the same numbers, bit for bit, alone and beside others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arealite.base.errors import UserError
from arealite.ext.embedded.batch_invariance import check_batch_invariant
from arealite.ext.embedded.cache_decoder import CacheDecoder
from arealite.ext.embedded.decoder import BaseDecoder, Decoder
from arealite.ext.embedded.generation import Generation, SamplingParams
from arealite.ext.embedded.served_adapters import read_low_rank
from arealite.ext.embedded.weight_loading import load_model
from tests.ext.embedded.adapter_runs import adapter_folder
from tests.fakes.embedded import running, server_config
from tests.models import tiny_model

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]
NAMES = "up", "down", "left"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


def invariant_decoder(model: Path, decoder_type: type[BaseDecoder] = Decoder) -> BaseDecoder:
    loaded, _ = load_model(str(model), dtype="float32", device="cpu", batch_invariant=True)
    return decoder_type(loaded, max_rows=16, seed=0, batch_invariant=True)


def is_usable(decoder: BaseDecoder) -> bool:
    """Return whether this processor has such products, which the check decides."""
    try:
        check_batch_invariant(decoder)
    except UserError as error:
        assert "on this processor" in str(error)
        return False
    return True


def requests(adapter: str, count: int) -> list[Generation]:
    """Return requests of different lengths; half of them have a common prefix."""
    rng = random.Random(adapter)
    prefix = [rng.randrange(64) for _ in range(24)]
    generations = list[Generation]()
    for number in range(count):
        own = [rng.randrange(64) for _ in range(rng.randrange(2, 40))]
        generations.append(
            Generation(
                rid=f"{adapter}-{number}",
                prompt=[*prefix, *own] if number % 2 else own,
                sampling=SamplingParams(sampling_seed=number),
                limit=4 + number,
                stops=frozenset(),
                adapter=adapter,
            )
        )
    return generations


@pytest.mark.parametrize("decoder_type", [Decoder, CacheDecoder])
def test_request_alone_and_beside_others(model: Path, decoder_type: type[BaseDecoder]) -> None:
    decoder = invariant_decoder(model, decoder_type)
    if not is_usable(decoder):
        pytest.skip("this processor adds numbers in an order that depends on the batch")
    alone = requests("", 10)
    for generation in alone:
        decoder.run([generation])
    beside = requests("", 10)
    decoder.run([*reversed(beside)])
    for one, other in zip(alone, beside, strict=True):
        assert one.output == other.output
        assert one.logprobs == other.logprobs


def test_tenant_alone_and_beside_others(model: Path, tmp_path: Path) -> None:
    decoder = invariant_decoder(model)
    if not is_usable(decoder):
        pytest.skip("this processor adds numbers in an order that depends on the batch")
    for seed, name in enumerate(NAMES):
        folder = adapter_folder(model, tmp_path / name, seed, rank=3 + seed)
        decoder.adapters.load(name, read_low_rank(decoder.model, folder))
    alone = list[Generation]()
    beside = list[Generation]()
    for name in NAMES:
        tenant = requests(name, 6)
        decoder.run(tenant)
        alone += tenant
        beside += requests(name, 6)
    mixed = [*beside]
    random.Random(0).shuffle(mixed)
    decoder.run(mixed)
    for one, other in zip(alone, beside, strict=True):
        assert one.output == other.output
        assert one.logprobs == other.logprobs


@pytest.fixture
def dependent(model: Path) -> BaseDecoder:
    """Return a decoder in which a layer depends on the number of rows."""
    decoder = invariant_decoder(model)
    layer = next(part for part in decoder.model.modules() if isinstance(part, torch.nn.Linear))
    forward: Callable[[torch.Tensor], torch.Tensor] = layer.forward

    def rounded(inputs: torch.Tensor) -> torch.Tensor:
        return forward(inputs) * (1.0 + 1e-5 * len(inputs))

    layer.forward = rounded
    return decoder


def test_decoder_that_depends_on_the_batch_is_refused(dependent: BaseDecoder) -> None:
    with pytest.raises(UserError, match=r"batch_invariant=true: .*alone and among 2 differ.*false"):
        check_batch_invariant(dependent)


async def test_server_checks_itself(model: Path, tmp_path: Path) -> None:
    config = server_config(model, tmp_path / "names")
    options = replace(config.llm_server.embedded, batch_invariant=True)
    config = replace(config, llm_server=replace(config.llm_server, embedded=options))
    try:
        async with running(config) as server:
            assert not server.engine.decoder.running
            assert server.engine.decoder._batch_invariant
    except UserError as error:
        assert "batch_invariant=true: on this processor" in str(error)
