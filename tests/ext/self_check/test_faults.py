"""Every planted fault is refused, and the error names it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from structlog.testing import capture_logs

from arealite.api.collector_config import CollectorConfig
from arealite.api.engine import Sequence
from arealite.api.engine_config import FSDPConfig, TrainEngineConfig
from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.launcher import LauncherConfig
from arealite.api.llm import SamplingConfig
from arealite.api.publisher import PublisherConfig
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.base.errors import UserError
from arealite.ext.embedded.embedded_server import EmbeddedServer
from arealite.ext.self_check import check as check_module
from arealite.ext.self_check import plain_copy
from arealite.ext.self_check.check import SelfCheck, self_check
from arealite.ext.self_check.difference_reasons import Comparison, bound_of, likely_reason
from arealite.impl.engine import fsdp
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.engine.micro_batches import MicroBatch, collate
from arealite.impl.trainer.rank_group import World
from tests.fakes.embedded import running, server_config
from tests.families import folders
from tests.families.configs import CONFIGS
from tests.impl.engine.helpers import make_engine
from tests.models import MIXTURES, tiny_mixture, tiny_model

STRICT = bound_of("float32", None, temperature=1.0, is_mixture=False)
LOW = bound_of("bfloat16", None, temperature=1.0, is_mixture=False)
DTYPES = ["float32", "float16", "bfloat16"]
"""Every fault below exceeds the noise in each dtype, except two, which are differences of dtypes:
a server in bfloat16 and a layer that rounds to bfloat16 exceed only the bounds of float32, because
the bounds are those of the coarser dtype."""
Model = Any
Plant = Callable[[Model], None]
"""Breaks the model of the server or of the trainer."""


def edited(folder: Path, **fields: Any) -> Path:
    """Copy a model folder and change fields of its config.json."""
    copy = folder.with_name("edited")
    shutil.copytree(folder, copy)
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return copy


def write(folder: Path, family: str = "qwen2", **fields: Any) -> Path:
    make: Any = tiny_mixture if family in MIXTURES else tiny_model
    return make(folder / "model", family=family, **{"init_std": 0.1} | fields)


def one_after_the_other(_: int) -> ThreadPoolExecutor:
    """Return a pool that makes one request at a time, so that all batches are those of each run."""
    return ThreadPoolExecutor(1)


class Run:
    """A trainer and a server that should serve the same model."""

    def __init__(
        self,
        folder: Path,
        *,
        temperature: float = 1.0,
        own: int = 0,
        dtype: str = "float32",
        layout: str = "auto",
    ) -> None:
        self.folder, self.served = folder, folder
        self.dtype = self.served_dtype = dtype
        self.options = {"dtype": dtype, "layout": layout}
        self.context_length: int | None = None
        self.temperature, self.own = temperature, own
        self.in_server: Callable[[EmbeddedServer], None] = lambda server: None

    @cached_property
    def engine(self) -> FSDPEngine:
        """The trainer's engine; a test may set another one."""
        return self.make_engine(self.folder)

    def make_engine(self, folder: Path) -> FSDPEngine:
        return make_engine(folder, **self.options)

    def check(self) -> dict[str, str]:
        """Run the self-check; return the result of each comparison."""
        return asyncio.run(self._check())

    def refusal(self) -> str:
        with pytest.raises(UserError) as caught:
            self.check()
        return str(caught.value)

    async def _check(self) -> dict[str, str]:
        engine = self.engine
        names, length = self.folder.parent / "names", self.context_length
        served = server_config(self.served, names, context_length=length)
        served = replace(served, model=replace(served.model, dtype=self.served_dtype))
        sampling = SamplingConfig(temperature=self.temperature)
        ppo = PPOConfig(
            engine=TrainEngineConfig(fsdp=FSDPConfig(dtype=self.dtype)),
            collector=CollectorConfig(sampling=sampling),
            publisher=PublisherConfig(timeout_s=60.0),
        )
        config = ExperimentConfig(
            cluster=served.cluster,
            model=ModelConfig(path=str(self.folder), dtype=self.dtype),
            trainer=TrainerConfig(ppo=ppo),
            launcher=LauncherConfig(llm_servers=self.own),
        )
        async with running(served) as server:
            await asyncio.wrap_future(server.resume("0"))
            self.in_server(server)
            checks: list[SelfCheck] = []

            def make_check(*args: Any) -> SelfCheck:
                checks.append(SelfCheck(*args))
                return checks[-1]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(check_module, "SelfCheck", make_check)
                await asyncio.to_thread(self_check, config, engine, World(), 0)
            return checks[-1].outcomes


@pytest.fixture(autouse=True)
def _group(group: None) -> None:
    pass


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["qwen2", "mistral", "deepseek_v3", "qwen3_moe"])
def test_sound_run_passes_and_reports_small_differences(
    tmp_path: Path, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in MIXTURES:  # near ties, the batch of a token decides which experts compute it
        monkeypatch.setattr(check_module, "ThreadPoolExecutor", one_after_the_other)
    fields = {"sliding_window": 16} if family == "mistral" else {}
    found = Run(write(tmp_path, family, **fields), dtype=dtype).check()
    assert len(found) == 2
    assert all("nats" in text for text in found.values()), found


def test_sound_run_of_a_noisy_model_passes_in_bfloat16(tmp_path: Path) -> None:
    """The noise of this model is above 0.15 nats, which was once the bound of every model."""
    found = Run(write(tmp_path, init_std=1.25), dtype="bfloat16").check()
    assert len(found) == 2
    text = found["plain transformers"]
    mean, bound = map(float, re.findall(r"row (\S+),.*; (\S+) and \S+ and a median", text)[0])
    assert 0.15 < mean < bound, text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bound_of_a_model_without_reference_is_that_of_smollm2(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_copy, "LARGEST", 1)
    sizes = {"float16": "0.036 and 0.44", "bfloat16": "0.28 and 3.2"}
    noise = "3 and 4 times the noise of SmolLM2-135M, because this model's own is not measured"
    run = Run(write(tmp_path), dtype=dtype)
    with capture_logs() as events:
        run.check()
    (event,) = (each for each in events if each["event"].startswith("self-check"))
    (text,) = (text for name, text in event.items() if name.startswith("server http"))
    assert f"{sizes[dtype]} are allowed in {dtype}, {noise}" in text
    run.served = tiny_model(tmp_path / "stale", seed=1, init_std=0.1)
    assert f"{sizes[dtype]} are allowed in {dtype}, {noise}" in (refusal := run.refusal())
    assert "stale weights: " in refusal


def test_noise_grows_with_a_low_temperature(tmp_path: Path) -> None:
    """Log-probabilities are those of logits / temperature; so is the noise of both kinds."""
    cold = bound_of("bfloat16", None, temperature=0.5, is_mixture=False)
    assert (cold.mean, cold.token) == (2 * LOW.mean, 2 * LOW.token)
    found = Run(write(tmp_path), dtype="bfloat16", temperature=0.1).check()
    assert len(found) == 2, found


@pytest.mark.parametrize("length", [3, 24])
def test_server_with_a_short_context_is_compared(tmp_path: Path, length: int) -> None:
    run = Run(write(tmp_path))
    run.context_length = length
    found = run.check()
    assert len(found) == 2 and all("nats" in text for text in found.values()), found


@pytest.mark.parametrize("fault", ["no answer", "other version"])
def test_check_that_compares_no_server_does_not_pass(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError("planted")

    run = Run(write(tmp_path))
    if fault == "no answer":
        monkeypatch.setattr(SelfCheck, "_request", fail)
    else:
        run.in_server = lambda server: server._model.relabel("7")
    with capture_logs() as events:
        found = run.check()
    told = [each["event"] for each in events if each["event"].startswith("self-check")]
    assert told == ["self-check incomplete"]
    ((other, text),) = ((name, text) for name, text in found.items() if "nats" not in text)
    if fault == "no answer":
        assert other.startswith("server http") and text == "not compared: OSError('planted')"
    else:
        assert (other, text) == ("servers", "not compared: none has version 0")


def zero_bias(model: Model) -> None:
    model.model.layers[1].mlp.gate.e_score_correction_bias.zero_()


def zero_expert(model: Model) -> None:
    experts = model.model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        getattr(experts, name).data[2] = 0.0


def swap(model: Model) -> None:
    one, other = model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj
    with torch.no_grad():  # FSDP keeps its own references to the data
        values = one.weight.clone()
        one.weight.copy_(other.weight)
        other.weight.copy_(values)


def untie(model: Model) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().roll(5, 0))


def quantise(model: Model) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            step = parameter.detach().abs().max() / 7
            parameter.data = (parameter.detach() / step).round() * step


IN_SERVER: dict[str, tuple[str, Plant, str]] = {
    "missing buffer": ("deepseek_v3", zero_bias, r"missing buffer: .*e_score_correction_bias"),
    "one expert zeroed": ("qwen3_moe", zero_expert, r"one expert: .*layers\.1\.mlp\.experts\.2\."),
    "swapped tensors": (
        "qwen2",
        swap,
        r"swapped tensors: values of .*(gate|up)_proj.*(gate|up)_proj",
    ),
    "tied head": ("qwen2", untie, r"tied head: 'lm_head\.weight'"),
    "quantised server": ("qwen2", quantise, r"quantised server: "),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "plant", "named"), IN_SERVER.values(), ids=IN_SERVER)
def test_fault_of_the_server_is_named(
    tmp_path: Path, family: str, plant: Plant, named: str, dtype: str
) -> None:
    run = Run(write(tmp_path, family), dtype=dtype)
    run.in_server = lambda server: plant(server.engine.decoder.model)
    text = run.refusal()
    assert "The trainer and server http" in text
    assert re.search(named, text), text


IN_TRAINER = {name: IN_SERVER[name] for name in ("missing buffer", "swapped tensors")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "plant", "named"), IN_TRAINER.values(), ids=IN_TRAINER)
def test_fault_of_the_trainer_is_named_with_its_place(
    tmp_path: Path, family: str, plant: Plant, named: str, dtype: str
) -> None:
    run = Run(write(tmp_path, family), dtype=dtype)
    plant(run.engine.module)
    text = run.refusal()
    assert "The trainer and plain transformers" in text
    assert re.search(named, text), text
    assert re.search(r"The first module that differs: model\.layers\.[01]\.mlp", text), text


EDITS: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "wrong window": ({"sliding_window": 6}, "sliding window", 6),
    "no window": ({"sliding_window": None}, "sliding window", 16),
    "rope theta": ({"rope_theta": 100.0, "rope_parameters": None}, "rope theta", None),
}
"""Edits of config.json, the reason that is named, and the first position that differs."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["server", "trainer"])
@pytest.mark.parametrize(("fields", "named", "position"), EDITS.values(), ids=EDITS)
def test_other_attention_is_named(
    tmp_path: Path,
    fields: dict[str, Any],
    named: str,
    position: int | None,
    where: str,
    dtype: str,
) -> None:
    """In 16 bits, the first different tokens may be within the noise."""
    run = Run(write(tmp_path, "mistral", sliding_window=16), dtype=dtype)
    if where == "server":
        run.served = edited(run.folder, **fields)
    else:
        run.engine = run.make_engine(edited(run.folder, **fields))
    text = run.refusal()
    assert f"{named}: " in text
    if position is not None:
        (first,) = re.findall(r"tokens differ from position (\d+) on", text)
        assert int(first) == position if dtype == "float32" else position <= int(first) < 48
    assert ("The first module that differs" in text) == (where == "trainer")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, -3, -100])
def test_window_below_1_is_named(tmp_path: Path, window: int, dtype: str) -> None:
    run = Run(write(tmp_path, "mistral", sliding_window=16), dtype=dtype)
    run.folder = run.served = edited(run.folder, sliding_window=window)
    run.engine = run.make_engine(run.folder)
    assert f"reason: sliding window: {window} in config.json is below 1" in run.refusal()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_that_is_not_finite_is_named(tmp_path: Path, dtype: str) -> None:
    run = Run(write(tmp_path), dtype=dtype)
    module: Any = run.engine.module
    module.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    assert "weights: 'model.layers.1.mlp.up_proj.weight' has NaN or infinity" in run.refusal()


def test_nan_of_any_row_is_a_difference() -> None:
    rows = [
        Sequence(tokens=np.arange(9, dtype=np.int32), loss_mask=np.arange(9) > 3, temperature=1.0)
    ] * 2
    zeros = np.zeros(5)
    found = Comparison(
        other="server", rows=rows, ours=[zeros, zeros], theirs=[zeros, zeros * np.nan], bound=STRICT
    )
    assert not found.is_equal


def test_dtype_of_the_server_is_named(tmp_path: Path) -> None:
    run = Run(write(tmp_path, init_std=0.2), own=1)
    run.served_dtype = "bfloat16"
    assert "dtype: the server computes in bfloat16, model.dtype is float32" in run.refusal()


def test_dtype_auto_of_an_external_server_is_not_the_reason() -> None:
    row, zeros = (
        Sequence(tokens=np.arange(9, dtype=np.int32), loss_mask=np.arange(9) > 3, temperature=1.0),
        np.zeros(9),
    )
    theirs, info = np.full(5, 3.0), {"dtype": "auto"}  # SGLang's default
    wrong = Comparison(
        other="server", rows=[row], ours=[zeros], theirs=[theirs], bound=LOW, info=info
    )
    alone = replace(wrong, theirs=[zeros])
    options: Any = {
        "alone": alone,
        "low": wrong,
        "by_temperature": {},
        "window": None,
        "dtype": "bfloat16",
    }
    found = likely_reason(wrong, tensors="stale weights: 9 of 9", **options)
    assert found == "stale weights: 9 of 9"


def test_overflow_of_plain_transformers_is_named() -> None:
    """Some models overflow in float16: no bound can be measured, and no program is right."""
    row, zeros = (
        Sequence(tokens=np.arange(9, dtype=np.int32), loss_mask=np.arange(9) > 3, temperature=1.0),
        np.zeros(5),
    )
    noise = [np.full(5, np.nan)]
    bound = bound_of("float16", noise, temperature=1.0, is_mixture=False)
    wrong = Comparison(
        other="plain transformers", rows=[row], ours=[zeros], theirs=[zeros], bound=bound
    )
    assert not wrong.is_equal
    options: Any = {"alone": wrong, "low": wrong, "by_temperature": {}, "window": None}
    found = likely_reason(wrong, tensors="", dtype="float16", **options)
    assert found == "dtype: plain transformers itself has NaN in float16"


def test_hidden_low_precision_of_the_server_is_named(tmp_path: Path) -> None:
    run = Run(write(tmp_path, init_std=0.2))

    def plant(server: EmbeddedServer) -> None:
        model: Any = server.engine.decoder.model
        decoder = model.model.layers[0].mlp
        forward = decoder.forward
        decoder.forward = lambda x: forward(x).bfloat16().float()

    run.in_server = plant
    assert "dtype: the differences are those of 16 bits" in run.refusal()


@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_that_the_server_ignores_is_named(tmp_path: Path, dtype: str) -> None:
    run = Run(write(tmp_path), temperature=0.6, dtype=dtype)

    def plant(server: EmbeddedServer) -> None:
        submit = server.engine.submit

        def ignore(generation: Any) -> None:
            generation.sampling = changed(generation.sampling, temperature=1.0)
            submit(generation)

        server.engine.submit = ignore  # type: ignore[method-assign]

    run.in_server = plant
    assert "temperature: server http" in (text := run.refusal())
    assert "has it at 1, the run at 0.6" in text


@pytest.mark.parametrize("dtype", DTYPES)
def test_stale_weights_of_the_server_are_named(tmp_path: Path, dtype: str) -> None:
    run = Run(write(tmp_path), dtype=dtype)
    run.served = tiny_model(tmp_path / "stale", seed=1, init_std=0.1)
    assert "stale weights: " in run.refusal()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_padded_on_the_wrong_side_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def left_padded(rows: Any, *args: Any) -> MicroBatch:
        batch = collate(rows, *args)
        lengths = np.array([len(row.tokens) - 1 for row in rows])
        width = batch.input_ids_BW.shape[1]
        moved = [line.roll(width - n) for line, n in zip(batch.input_ids_BW, lengths, strict=True)]
        index = batch.index_N + torch.tensor(width - lengths)[batch.rows_N]
        return replace(batch, input_ids_BW=torch.stack(moved), index_N=index)

    run = Run(write(tmp_path), dtype=dtype, layout="padded")
    monkeypatch.setattr(fsdp, "collate", left_padded)
    assert "padding: a row's log-probabilities depend on the other rows" in run.refusal()


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_trainer_of_a_state_space_model_is_as_near_as_plain_transformers_in_bfloat16(
    tmp_path: Path, family: str
) -> None:
    """The last norm of these models returns float32, and their head has bfloat16 weights."""
    folder = folders.write(folders.build(family, CONFIGS[family]), tmp_path / "model")
    rng = np.random.default_rng(0)
    rows = list[Sequence]()
    for size in (25, 36, 72):
        tokens_T = rng.integers(8, 48, size).astype(np.int32)
        mask_T = np.arange(size) > 0
        rows.append(Sequence(tokens=tokens_T, loss_mask=mask_T, temperature=1.0))
    plain = plain_copy.PlainModel(folder)
    exact = [plain.exact(row) for row in rows]
    scored = make_engine(folder, dtype="bfloat16", layout="padded").forward(rows)["logprobs"]
    pairs = zip(scored, exact, strict=True)
    differences = [abs(ours[-len(theirs) :] - theirs).mean() for ours, theirs in pairs]
    noise = [row.mean() for row in plain.noise(rows, "bfloat16")]
    assert 0 < max(differences) < 2 * max(noise)
