"""Reads a Hugging Face folder into a sharded model.

A rank has at most one full parameter in memory beside its shards. The exception is a model whose
files and modules use different parameter names, such as some mixtures of experts: every rank reads
such a model completely.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_utils import PreTrainedModel as Model

from arealite.api.engine import Head
from arealite.base.errors import UserError
from arealite.base.model_folder import check_logits, weight_files
from arealite.impl.engine.lora import ADAPTER, file_name, first_value, state_tensors

SCORE = "score.weight"
"""Weight of the value head."""
FIX = "Weights and config.json are of different models: download the folder again."


def empty_model(path: Path, head: Head = "lm") -> Model:
    """Build the model of a Hugging Face folder, parameters on the meta device, in eval mode.

    Head value: the folder's decoder as a sequence classifier of one label.

    Raises:
        UserError: no such folder, or a head that computes more than hidden · weightᵀ.
    """
    if not (path / "config.json").is_file():
        raise UserError(f"No model at '{path}': it must be a Hugging Face folder with config.json.")
    config, kind = AutoConfig.from_pretrained(path), AutoModelForCausalLM
    if head == "value":
        config.num_labels, kind = 1, AutoModelForSequenceClassification
        if type(config) not in kind._model_mapping:
            raise UserError(f"transformers has no {config.model_type} with a head for values.")
    else:
        check_logits(config.to_dict(), path)
    with _parameters_on_meta():
        model = kind.from_config(config, dtype=torch.float32)
    if head == "lm" and getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UserError(f"'{path}' has a bias in its output head: not supported.")
    return model.eval()


def set_dtypes(model: nn.Module, dtype: torch.dtype) -> bool:
    """Cast frozen parameters to the compute dtype.

    Returns:
        Whether all parameters now have that dtype. Adapters do not count: they accept inputs of any
        dtype and compute in their own.
    """
    for name, param in model.named_parameters():
        if not param.requires_grad and name != SCORE:
            param.data = param.data.to(dtype)
    return all(param.dtype == dtype or ADAPTER in name for name, param in model.named_parameters())


def load_weights(
    model: Model, path: Path, device: torch.device, *, offload: bool = False, seed: int = 0
) -> None:
    """Materialise `model`, and load its parameters or their shards from the folder's safetensors.

    Buffers are on `device`; parameters, too, or with `offload` on the CPU. A value head that the
    folder lacks is initialised to 0, and adapters from `seed`, equally on all ranks.

    Raises:
        UserError: the folder lacks any other tensor of the model, or has a tensor that the model
            lacks.
    """
    read = _reader(model, path)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device=torch.device("cpu") if offload else device)
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        model.tie_weights()  # to_empty keeps shared parameters shared under FSDP only
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in state_tensors(model):
            full = read(file_name(name))
            full = first_value(name, tensor.shape, generator) if full is None else full
            if full.shape != tensor.shape:
                what = f"'{path}': {file_name(name)} has shape {list(full.shape)}"
                raise UserError(f"{what}, the model of its config.json {list(tensor.shape)}. {FIX}")
            full = full.to(device=device, dtype=tensor.dtype)
            if isinstance(tensor, DTensor):
                # src_data_rank=None: every rank cuts its own shard, nothing is sent.
                mesh, placements = tensor.device_mesh, tensor.placements
                full = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
                tensor.to_local().copy_(full)
            else:
                tensor.copy_(full)


def _reader(model: Model, path: Path) -> Callable[[str], torch.Tensor | None]:
    """Return a function from a name to the full tensor; it may load the whole model.

    The function returns None only for adapters and a fresh value head.
    """
    where = dict[str, Path]()
    for file in weight_files(path):
        with safe_open(file, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)

    def read(name: str) -> torch.Tensor | None:
        if name not in where:
            return None
        # Opened for each tensor: pages of an open file count as this process's memory.
        with safe_open(where[name], framework="pt") as opened:
            return opened.get_tensor(name)

    wanted = {file_name(name) for name, _ in state_tensors(model) if ADAPTER not in name}
    if wanted - {SCORE} <= where.keys():
        tied = {file_name(name) for name in model.state_dict()}
        _check_names(model, path, set(), where.keys() - tied)
        return read
    load: Any = type(model).from_pretrained  # with output_loading_info it returns a pair
    try:
        whole, info = load(path, config=model.config, dtype=torch.float32, output_loading_info=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"'{path}' cannot be loaded: {str(error).splitlines()[0]}") from error
    _check_names(model, path, set(info["missing_keys"]), set(info["unexpected_keys"]))
    state: dict[str, torch.Tensor] = whole.state_dict()
    return {name: state[name] for name in wanted - set(info["missing_keys"])}.get


def _check_names(model: Model, path: Path, missing: set[str], unexpected: set[str]) -> None:
    """Raise UserError unless the folder holds exactly the tensors of `model`."""
    unused = [*(model._keys_to_ignore_on_load_unexpected or []), r"\.inv_freq$"]
    if SCORE in model.state_dict():
        unused.append(r"^lm_head\.")
    if getattr(model.config, "num_nextn_predict_layers", 0):  # predict further tokens
        unused.append(rf"\.layers\.{model.config.num_hidden_layers}\.")
    left = {name for name in unexpected if not any(re.search(rule, name) for rule in unused)}
    for names, what in (missing - {SCORE}, "lacks"), (left, "has tensors that the model lacks:"):
        if names:
            listed = ", ".join(sorted(names)[:3])
            raise UserError(f"'{path}' {what} {listed} ({len(names)} in all). {FIX}")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put new parameters on the meta device; buffers are computed as usual."""
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
