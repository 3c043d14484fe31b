"""The engine in two gloo processes equals one process; SIGKILL during a save."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from arealite.impl.engine import checkpoint
from tests.impl.engine import worker
from tests.impl.engine.helpers import (
    LOSS,
    VARIANTS,
    assert_close,
    gradients,
    load,
    loss_of,
    make_engine,
    make_rows,
    save,
    weights,
)
from tests.impl.engine.worker import ONE_EMPTY, UNEVEN
from tests.models import tiny_model
from tests.ranks import run_ranks

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.processes]


def launch(scenario: str, folder: Path, model: Path, world: int) -> list[int | None]:
    """Run a scenario of the worker as `world` ranks; return their exit codes."""
    ranks = [{"WORLD_SIZE": str(world), "RANK": str(rank)} for rank in range(world)]
    return run_ranks(worker.main, (scenario, folder, str(model)), ranks)


@pytest.fixture(scope="module", params=["ranks", "copies"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Path:
    """Return the output folder of two ranks with one copy of the model, or four with two."""
    path = tmp_path_factory.mktemp(request.param)
    world = {"ranks": 2, "copies": 4}[request.param]
    assert launch(request.param, path, model, world) == [0] * world
    return path


@pytest.fixture(scope="module")
def outs(folder: Path) -> list[dict[str, Any]]:
    return results(folder)


def results(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("out-*.pt"))
    return [torch.load(file, weights_only=False) for file in files]


@pytest.mark.parametrize("name", ["uneven", "one_empty"])
def test_gradients_do_not_depend_on_ranks_or_micro_batches(
    name: str, outs: list[dict[str, Any]], model: Path
) -> None:
    rows = make_rows()
    engine = make_engine(model, layout="packed")
    expected, stats = gradients(engine, rows)
    assert stats["microbatches"] == 1.0
    logprobs = engine.forward(rows)["logprobs"]
    for rank, out in enumerate(outs):
        got, got_stats = out[name]
        assert_close(got, expected)
        assert got_stats["microbatches"] > 4.0
        assert got_stats["loss"] == pytest.approx(stats["loss"], abs=1e-6)
        assert got_stats["ratio"] == pytest.approx(stats["ratio"], rel=1e-5)
        mine = [*{"uneven": UNEVEN, "one_empty": ONE_EMPTY}[name], [], []][rank]
        for i, values in zip(mine, out[f"{name}_forward"]["logprobs"], strict=True):
            np.testing.assert_allclose(values, logprobs[i], atol=1e-5)


def test_gradients_of_two_calls_on_several_ranks_equal_those_of_one(
    outs: list[dict[str, Any]], model: Path
) -> None:
    expected, _ = gradients(make_engine(model), make_rows())
    for out in outs:
        assert_close(out["two_calls"][0], expected)


def test_all_ranks_return_the_same_stats_and_rank_0_the_weights(outs: list[dict[str, Any]]) -> None:
    assert outs[0]["stats"] == outs[1]["stats"]
    assert outs[0]["weights"].keys() > set()
    assert outs[1]["weights"] == {}


def test_resume_on_the_same_number_of_ranks_is_bitwise_equal(outs: list[dict[str, Any]]) -> None:
    assert outs[1]["extra"] == {"step": 1}
    expected = outs[0]["weights"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in outs[0]["resumed"].items())


def test_fingerprint_is_equal_on_all_ranks_and_after_resume(
    outs: list[dict[str, Any]], model: Path
) -> None:
    found = {out[key] for out in outs for key in ("fingerprint", "resumed_fingerprint")}
    assert len(found) == 1
    assert len(int(found.pop(), 16).to_bytes(8, "big")) == 8
    assert outs[0]["fingerprint"] != make_engine(model).fingerprint()


def test_resume_on_one_rank_is_equal_within_rounding(
    outs: list[dict[str, Any]], folder: Path, model: Path
) -> None:
    rows = make_rows()
    engine = make_engine(model)
    load(engine, folder / "step-1")
    stats = engine.train_batch(rows, LOSS)
    assert stats["grad_norm"] == pytest.approx(outs[0]["stats"]["grad_norm"], rel=1e-4)
    assert_close(weights(engine), outs[0]["weights"], tolerance=1e-3)


def test_export_of_two_ranks_loads_with_from_pretrained(
    outs: list[dict[str, Any]], folder: Path
) -> None:
    state = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in outs[0]["weights"].items())


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Return the output folder of two ranks for each variant, with a checkpoint of one rank."""
    path, rows = tmp_path_factory.mktemp("variants"), make_rows()
    for name, options in VARIANTS.items():
        engine = make_engine(model, **options)
        engine.train_batch(rows, loss_of(engine))
        save(engine, path / f"{name}-of-one", {"step": 1})
    assert launch("variants", path, model, 2) == [0, 0]
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_agree_between_one_rank_and_two(name: str, variants: Path, model: Path) -> None:
    first, second = (out[name] for out in results(variants))
    assert first["stats"] == second["stats"]
    assert first["resumed"] and second["resumed"]
    rows, low = make_rows(), "low" in name
    engine = make_engine(model, **VARIANTS[name])
    expected, _ = gradients(engine, rows, updates=True)
    assert_close(first["gradients"], expected, tolerance=3e-2 if low else 1e-5)
    stats = engine.train_batch(rows, loss_of(engine))
    assert stats["grad_norm"] == pytest.approx(first["stats"]["grad_norm"], rel=1e-2)
    assert_close(weights(engine), first["weights"], tolerance=2e-2 if low else 1e-3)
    load(engine, variants / f"{name}-of-one")
    assert all(torch.equal(t, first["of one"][name]) for name, t in weights(engine).items())
    load(engine, variants / f"{name}-2")
    assert all(torch.equal(t, first["weights"][name]) for name, t in weights(engine).items())
    outputs = engine.forward(rows)
    for kind, values in outputs.items():
        theirs = first["forward"][kind] + second["forward"][kind]
        for ours, other in zip(values, theirs, strict=True):
            np.testing.assert_allclose(ours, other, atol=0.1 if low else 1e-4)


def test_frozen_engine_and_disabled_adapter_equal_the_initial_policy(
    variants: Path, model: Path
) -> None:
    rows, outs = make_rows(), results(variants)
    expected = make_engine(model).forward(rows)
    for found in (outs, [out["lora"] for out in outs]):
        for name, values in expected.items():
            theirs = [row for out in found for row in out["base"][name]]
            for ours, other in zip(values, theirs, strict=True):
                np.testing.assert_allclose(ours, other, atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("world", [1, 2])
def test_peak_memory_of_a_rank_is_below_a_second_copy(world: int, tmp_path: Path) -> None:
    """Besides its shard, a rank has a few tensors and one part of a file in memory."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    big = tiny_model(tmp_path / "model", vocab=512, **sizes)
    whole = (big / "model.safetensors").stat().st_size
    assert whole > 180e6
    tiny_model(tmp_path / "tiny")
    assert launch("memory", tmp_path, big, world) == [0] * world
    for rank in range(world):
        found = json.loads((tmp_path / f"memory-{rank}.json").read_text())
        found["load"] -= whole // world
        assert {name: grown for name, grown in found.items() if grown > 0.4 * whole} == {}


def test_sigkill_before_the_rename_leaves_the_old_checkpoint(tmp_path: Path, model: Path) -> None:
    assert launch("kill_in_save", tmp_path, model, 1) == [-signal.SIGKILL]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    assert (tmp_path / ".step-2.tmp" / checkpoint.MANIFEST).exists()
    assert not (tmp_path / "step-2").exists()
    assert load(make_engine(model), tmp_path / "step-1") == {"step": 1}
