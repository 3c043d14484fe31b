"""A second copy of the model in plain transformers: the reference of the self-check.

Shape letters: T = tokens of one row, N = loss tokens of the row, V = entries of the vocabulary.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from arealite.api.engine import Named, Sequence
from arealite.base.model_folder import read_json
from arealite.ext.self_check.free_memory import available_memory
from arealite.ext.weights.casting import computing_in
from arealite.ext.weights.updatable_tensors import UpdatableTensors
from arealite.impl.engine.loading import DTYPES

LARGEST = 2 * 10**9
"""Parameters of the largest model that is loaded a second time."""
BYTES_PER_PARAMETER = 5
"""Memory of the second copy: float32, and a quarter more for one forward pass."""
TOLERANCES = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.2}
"""Largest relative difference of a module's output, by the dtype of the trainer."""
WATCHED = re.compile(r".*(embed_tokens|layers\.\d+(\.\w+)?)")
"""Names of the modules whose outputs are compared: the embedding, layers, and their parts."""


def obstacle(numel: int) -> str:
    """Return why a model of `numel` parameters is not loaded beside the trainer; "" if it is."""
    if numel > LARGEST:
        return f"{numel / 1e9:.1f} B parameters are too large for a second copy"
    if torch.cuda.is_available():
        free_bytes, _ = torch.cuda.mem_get_info()
    else:
        free_bytes = available_memory()
    copy_bytes = numel * BYTES_PER_PARAMETER
    if copy_bytes > free_bytes:
        return f"a second copy needs {decimal(copy_bytes)}, and {decimal(free_bytes)} are free"
    return ""


class PlainModel:
    """Plain transformers in float32 with its reference attention, one row at a time."""

    def __init__(self, folder: Path) -> None:
        logging.disable_progress_bar()
        load: Any = AutoModelForCausalLM.from_pretrained
        # The eager code of Falcon adds alibi twice.
        attention = "sdpa" if read_json(folder).get("alibi") else "eager"
        model = load(folder, dtype=torch.float32, attn_implementation=attention)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.to(device).eval()
        self.names = UpdatableTensors(self.model, folder)
        self._exact = dict[tuple[bytes, bytes, float], np.ndarray]()
        """The results of `exact`; a key is the tokens, loss mask and temperature of a row."""

    def update(self, weights: Iterator[Named]) -> None:
        """Copy tensors that have the names of the folder into the model."""
        self._exact.clear()
        state = self.model.state_dict()
        for name, tensor in self.names.to_model(weights, {}):
            state[name].copy_(tensor)

    def stored(self) -> Iterator[Named]:
        """Yield the tensors of the folder."""
        for name in self.names.headers:
            yield name, self.names.read(name)

    def noise(self, rows: list[Sequence], dtype: str) -> list[np.ndarray]:
        """Return how far the logprobs of loss tokens in a dtype are from those in float32 [T]."""
        exact = [self.exact(row) for row in rows]
        with computing_in(self.model, DTYPES[dtype]):
            rounded = [self.score(row) for row in rows]
        pairs = zip(rounded, exact, strict=True)
        return [abs(logprobs - exact_logprobs) for logprobs, exact_logprobs in pairs]

    def exact(self, row: Sequence) -> np.ndarray:
        """Return the result of `score` in float32; a row is computed once."""
        key = (
            row.tokens.tobytes(),
            row.loss_mask.tobytes(),
            row.temperature,
        )
        if key not in self._exact:
            self._exact[key] = self.score(row)
        return self._exact[key]

    @torch.no_grad()
    def score(self, row: Sequence) -> np.ndarray:
        """Return the logprobs of a row's loss tokens, which are its last ones."""
        num_loss = int(row.loss_mask.sum())
        tokens_T = torch.from_numpy(row.tokens.astype(np.int64))
        ids_T = tokens_T.to(self.model.device)
        output = self.model(
            ids_T[None, :-1],
            use_cache=False,
            logits_to_keep=num_loss,
        )
        logits_NV = output.logits[0, -num_loss:].float() / row.temperature
        logprobs_NV = logits_NV.log_softmax(-1)
        logprobs_N1 = logprobs_NV.gather(-1, ids_T[-num_loss:, None])
        return logprobs_N1[:, 0].cpu().numpy()


@contextmanager
def watched(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that gets the first output of each watched module, float32 [tokens, H]."""
    outputs = dict[str, Tensor]()

    def record(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.ndim == 3:
            tokens_H = tensor.detach().flatten(0, 1)
            outputs.setdefault(name, tokens_H.float().cpu())

    with ExitStack() as stack:
        modules = model.named_modules() if model is not None else ()
        for name, module in modules:
            if WATCHED.fullmatch(name):
                hook = module.register_forward_hook(lambda *args, n=name: record(n, args[-1]))
                stack.callback(hook.remove)
        yield outputs


def first_difference(
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    dtype: str,
) -> str:
    """Return the first module whose outputs differ; "the head" if none does, "" if unknown."""
    for name, right in theirs.items():
        if name not in ours or ours[name].shape != right.shape:
            return ""
        largest_error = (ours[name] - right).abs().max()
        scale = right.abs().max().clamp(min=1e-6)
        is_within = largest_error / scale <= TOLERANCES[dtype]  # False for NaN
        if not is_within:
            return name
    return "the head"
