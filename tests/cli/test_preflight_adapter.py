"""`arealite check` reads the adapter that a run starts from, and names the layers with adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from arealite.cli.main import main
from tests.cli.test_preflight_model import refused, words

RANK = "trainer.ppo.engine.fsdp.lora.rank"
TARGETS = "trainer.ppo.engine.fsdp.lora.targets"


def tiny_adapter(folder: Path, *, width: int = 32, **fields: object) -> Path:
    """Write an adapter of q_proj in both layers of the tiny model."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.zeros(
            shape
        )
        for layer in range(2)
        for side, shape in (("A", (4, width)), ("B", (32, 4)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def said(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().out.splitlines()
    return next(line for line in lines if line.startswith("adapters"))


def test_check_names_the_layers_with_and_without_adapter(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(model)
    assert main(["check", *given, f"{RANK}=2", f"{TARGETS}=[q_proj,v_proj,down_proj]"]) == 0
    assert "rank 2, alpha 16, on down_proj ×2, q_proj ×2, v_proj ×2; none on" in said(capsys)
    assert main(["check", *given, f"{RANK}=2", f"{TARGETS}=[all-linear]"]) == 0
    assert "none on" not in said(capsys)
    adapter = tiny_adapter(model.parent / "adapter")
    assert main(["check", *given, f"model.adapter={adapter}"]) == 0
    assert "rank 4, alpha 8, on q_proj ×2; none on" in said(capsys)


REFUSED: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "no adapter": (lambda folder: folder.mkdir(), [], "is no LoRA adapter that peft wrote"),
    "other kind": (lambda folder: tiny_adapter(folder, peft_type="IA3"), [], "is no LoRA adapter"),
    "dora": (lambda folder: tiny_adapter(folder, use_dora=True), [], "has use_dora=True"),
    "pissa": (
        lambda folder: tiny_adapter(folder, init_lora_weights="pissa"),
        [],
        "has init_lora_weights=pissa",
    ),
    "no rank": (
        lambda folder: tiny_adapter(folder, r=0),
        [],
        "has r=0. It must be a positive number",
    ),
    "alpha": (
        lambda folder: tiny_adapter(folder, lora_alpha="eight"),
        [],
        "has lora_alpha='eight'. It must be a positive number.",
    ),
    "other model": (
        lambda folder: tiny_adapter(folder, width=48),
        [],
        "has shape [4, 48], but model.layers.0.self_attn.q_proj [32, 32] in model.path",
    ),
    "rank": (tiny_adapter, [f"{RANK}=8"], "lora.rank=8, but model.adapter has 4. Remove"),
    "reward": (
        tiny_adapter,
        ["trainer.type=reward"],
        "trainer.type=reward cannot start from an adapter",
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_unusable_adapter_is_refused(
    how: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, more, says = REFUSED[how]
    folder = model.parent / "adapter"
    make(folder)
    line = refused(capsys, "train", *words(model), f"model.adapter={folder}", *more)
    assert says in line


@pytest.mark.parametrize(
    ("command", "targets", "says"),
    [
        (
            "check",
            "[c_attn]",
            "model.path has no such layer. Use some of down_proj, gate_proj, k_proj",
        ),
        (
            "check",
            "[q_proj,foo_proj]",
            "Target modules ['foo_proj'] not found in the base model. Name other layers",
        ),
        (
            "check",
            "[all-linear,q_proj]",
            "all-linear means all layers. Remove the other names.",
        ),
        (
            "train",
            "[all-linear,q_proj]",
            "all-linear means all layers. Remove the other names.",
        ),
    ],
)
def test_target_without_a_layer_is_refused(
    command: str, targets: str, says: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, command, *words(model), f"{RANK}=2", f"{TARGETS}={targets}")
    assert says in line


def test_adapter_of_another_rank_is_refused_by_check(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tiny_adapter(model.parent / "adapter", r=8)
    line = refused(capsys, "check", *words(model), f"model.adapter={adapter}")
    assert line.count("layers.0.self_attn.q_proj.lora_A.weight") == 1
    assert "has shape [4, 32], but [8, 32] in its config on this model. Use another." in line


def test_adapter_of_the_head_is_refused_with_the_fix(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tiny_adapter(model.parent / "adapter", target_modules=["q_proj", "lm_head"])
    line = refused(capsys, "check", *words(model), f"model.adapter={adapter}")
    assert "'lm_head' is no linear layer" in line
    assert line.endswith("gets no adapter. Merge the adapter into a model folder.")
