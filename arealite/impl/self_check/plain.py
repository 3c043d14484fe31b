"""A second copy of the model in plain transformers: the reference of the self-check."""

import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from arealite.api.engine import Sequence
from arealite.base.model_folder import weight_files
from arealite.impl.self_check.comparison import masked
from arealite.impl.weights.buckets import Named
from arealite.impl.weights.names import TensorNames

LARGEST = 2 * 10**9
"""Parameters of the largest model that is loaded a second time."""
TOLERANCES = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.2}
"""Largest relative difference of a module's output, by the dtype of the trainer."""
Outputs = dict[str, Tensor]
"""Outputs of modules by name, float32 [tokens, H] on the CPU, in the order of the computation."""


def obstacle(numel: int) -> str:
    """Return why a model of `numel` parameters is not loaded beside the trainer; "" if it is."""
    need, free = numel * 5, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    if numel > LARGEST or need > free:
        size = f"{numel / 1e9:.1f} B parameters need {need / 1e9:.0f} GB"
        return f"{size}, {free / 1e9:.0f} GB are free, and more than 2 B take too long"
    return ""


class PlainModel:
    """Plain transformers in float32 with its reference attention, one row at a time."""

    def __init__(self, folder: Path) -> None:
        logging.disable_progress_bar()
        load: Any = AutoModelForCausalLM.from_pretrained
        model = load(folder, dtype=torch.float32, attn_implementation="eager")
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.folder = folder

    def update(self, weights: Iterator[Named]) -> None:
        """Copy tensors that have the names of the folder into the model."""
        state = self.model.state_dict()
        for name, tensor in TensorNames(self.model, self.folder).to_model(weights, {}):
            state[name].copy_(tensor)

    def score(self, rows: Seq[Sequence]) -> np.ndarray:
        """Return the logprobs [B, T], NaN outside the loss masks."""
        made_BT = masked(rows)
        for line, row in zip(made_BT, rows, strict=True):
            count = int(row.loss_mask.sum())
            ids_T = self._ids(row)
            with torch.no_grad():
                output = self.model(ids_T[None, :-1], use_cache=False, logits_to_keep=count)
            logprobs = (output.logits[0, -count:].float() / row.temperature).log_softmax(-1)
            chosen = logprobs.gather(-1, ids_T[-count:, None])[:, 0]
            line[: len(row.tokens)][row.loss_mask] = chosen.cpu().numpy()
        return made_BT

    def outputs(self, row: Sequence) -> Outputs:
        """Return the outputs of the modules for the inputs of one row."""
        with watched(self.model) as found, torch.no_grad():
            self.model(self._ids(row)[None, :-1], use_cache=False)
        return found

    def _ids(self, row: Sequence) -> Tensor:
        return torch.from_numpy(row.tokens.astype(np.int64)).to(self.model.device)


@contextmanager
def watched(model: Any) -> Iterator[Outputs]:
    """Record the first output of the embedding, of each layer, and of the parts of each layer."""
    found, decoder = Outputs(), model.get_decoder()

    def record(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.ndim == 3:
            found.setdefault(name, tensor.detach().flatten(0, 1).float().cpu())

    modules: dict[str, nn.Module] = dict(decoder.named_children())
    for number, layer in enumerate(decoder.layers):
        parts = layer.named_children()
        modules |= {f"layers.{number}": layer} | {f"layers.{number}.{n}": m for n, m in parts}
    with ExitStack() as stack:
        for name, module in modules.items():
            hook = module.register_forward_hook(lambda *args, n=name: record(n, args[-1]))
            stack.callback(hook.remove)
        yield found


def first_difference(ours: Outputs, theirs: Outputs, dtype: str) -> str:
    """Return the first module whose outputs differ; `the head` if none does, "" if unknown."""
    for name, right in theirs.items():
        if name not in ours or ours[name].shape != right.shape:
            return ""
        error = (ours[name] - right).abs().max() / right.abs().max().clamp(min=1e-6)
        if not error <= TOLERANCES[dtype]:
            return name
    return "the head"


def stored(folder: Path) -> Iterator[Named]:
    """Yield the tensors of a model folder."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
