"""Read a Hugging Face folder into a sharded model, and write one from it.

Here so that no rank ever holds more than one full parameter beside its shards (models whose files
name parameters differently than their modules, such as some mixtures of experts, are read whole,
one copy a rank).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from arealite.base.errors import UserError

SHARD_BYTES = 4 << 30
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def empty_model(path: Path) -> Any:
    """Build the model of a Hugging Face folder with parameters on the meta device, without dropout.

    Raises:
        UserError: no such folder, or a head whose logits are more than hidden · weightᵀ.
    """
    if not (path / "config.json").is_file():
        raise UserError(f"No model at '{path}': it must be a Hugging Face folder with config.json.")
    config = AutoConfig.from_pretrained(path)
    if getattr(config, "final_logit_softcapping", None):
        raise UserError(f"'{path}' caps its logits (final_logit_softcapping): not supported.")
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UserError(f"'{path}' has a bias in its output head: not supported.")
    return model


def load_weights(model: Any, path: Path, device: torch.device) -> None:
    """Materialise the sharded `model` on `device` and fill it from the folder's safetensors."""
    read = _reader(path, {name for name, _ in model.named_parameters()})
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for name, param in model.named_parameters():
            full = read(name).to(device=device, dtype=param.dtype)
            # src_data_rank=None: every rank cuts its own shard, nothing is sent.
            mesh, placements = param.device_mesh, param.placements
            param.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None))


def export_folder(
    path: Path, source: Path, *, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Write a folder that `from_pretrained` loads: tokenizer and other small files of `source`,
    config, weights."""
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, path / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    files = [_save(path, i, part) for i, part in enumerate(_parts(weights))]
    if len(files) == 1:
        (path / files[0][0]).rename(path / "model.safetensors")
        return
    index = {
        "metadata": {"total_size": sum(size for _, _, size in files)},
        "weight_map": {name: file for file, names, _ in files for name in names},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _parts(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > SHARD_BYTES:
            yield part
            part = {}
        part[name] = tensor
    yield part


def _save(path: Path, index: int, part: dict[str, torch.Tensor]) -> tuple[str, list[str], int]:
    file = f"model-{index + 1:05d}.safetensors"
    save_file(part, path / file, metadata={"format": "pt"})
    return file, list(part), sum(tensor.nbytes for tensor in part.values())


def _reader(path: Path, names: set[str]) -> Callable[[str], torch.Tensor]:
    """Return a function that reads one full parameter; from the whole model if file and module
    names differ."""
    files = [safe_open(file, framework="pt") for file in sorted(path.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    if names <= where.keys():
        return lambda name: where[name].get_tensor(name)
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    return lambda name: state[name]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put new parameters on the meta device; buffers, which no file holds, are still computed."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
