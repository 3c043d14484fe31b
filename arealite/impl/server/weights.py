"""Loads models, and new weights into a live one: checked whole before the first byte is written.

SGLang pads or ignores tensors that do not fit; a server that generates from garbage and reports
success would poison the training data.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from arealite.base.errors import UserError
from arealite.impl.server.protocol import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOATS = {"F64", "F32", "F16", "BF16"}


class StagedWeights:
    """A folder of safetensors, opened and checked against a model; `load` only copies."""

    def __init__(self, targets: Mapping[str, torch.Tensor], path: str) -> None:
        """Open the files and compare names, shapes and types with the `live_tensors` of a model.

        Raises:
            Refusal: the folder or a tensor does not fit the model; the model is untouched.
        """
        self._files = ExitStack()
        self._copies: list[tuple[torch.Tensor, Any, str]] = []
        try:
            self._stage(targets, path)
        except BaseException:
            self._files.close()
            raise

    def _stage(self, targets: Mapping[str, torch.Tensor], path: str) -> None:
        seen: set[str] = set()
        for name, file in self._open(path):
            target = targets.get(name)
            if target is None:
                raise Refusal(f"Failed to update weights: {path} has '{name}', the model has not.")
            held = file.get_slice(name)
            shape, dtype = list(held.get_shape()), held.get_dtype()
            if shape != list(target.shape):
                raise Refusal(
                    f"Failed to update weights: '{name}' has shape {shape}, the model "
                    f"{list(target.shape)}."
                )
            if target.is_floating_point() != (dtype in FLOATS):
                raise Refusal(
                    f"Failed to update weights: '{name}' has dtype {dtype}, the model "
                    f"{target.dtype}."
                )
            seen.add(name)
            self._copies.append((target, file, name))
        covered = {targets[name].data_ptr() for name in seen}
        missing = [name for name, t in targets.items() if t.data_ptr() not in covered]
        if missing:
            raise Refusal(f"Failed to update weights: {path} lacks {', '.join(missing[:5])}.")

    def _open(self, path: str) -> Iterator[tuple[str, Any]]:
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            raise Refusal(f"Failed to get weights iterator: no safetensors in {path}.")
        for file in files:
            try:
                handle = self._files.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise Refusal(f"Failed to get weights iterator: {file}: {error}") from error
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                yield name, handle

    def load(self) -> None:
        """Copy everything into the model, and close the files."""
        with self._files, torch.no_grad():
            for target, file, name in self._copies:
                target.copy_(file.get_tensor(name))


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's own parameters and buffers by name, tied ones under each of their names."""
    return model.state_dict(keep_vars=True)


def load_model(path: str, *, dtype: str, device: str) -> tuple[Any, Any]:
    """Return (model in evaluation mode, tokenizer) of a Hugging Face folder.

    Raises:
        UserError: there is no such model, or it is of a kind this server cannot run.
    """
    if not path:
        raise UserError(
            "model.path is empty. Give a Hugging Face folder: model.path=/path/to/model"
        )
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path={path}: no model there (config.json is missing).")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"model.path={path}: no *.safetensors in it.")
    if dtype not in DTYPES:
        raise UserError(f"model.dtype={dtype}: must be one of {', '.join(DTYPES)}.")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation="sdpa"
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(f"model.path={path}: cannot be loaded: {line}") from error
    _check_attention(model, path)
    return model.to(pick_device(device)).eval().requires_grad_(False), tokenizer


def _check_attention(model: Any, path: str) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UserError(
            f"model.path={path}: has layers of {', '.join(sorted(kinds))}; the embedded server "
            "runs models with full attention only. Use SGLang for this one."
        )


def pick_device(device: str) -> str:
    """Turn "auto" into what this machine has.

    Raises:
        UserError: cuda was asked for and is not there.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"llm_server.embedded.device={device}: no GPU here. Use auto or cpu.")
    return device
