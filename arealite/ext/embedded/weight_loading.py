"""Loads models, and new weights into a running model after a check of names, shapes and numbers.

SGLang pads or ignores tensors that do not fit. A server with wrong weights that reports success
would corrupt the training data.
"""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from arealite.api.engine import Named
from arealite.base.errors import UserError, one_line
from arealite.base.host import return_free_memory
from arealite.base.model_folder import ModelTensors, read_headers, read_json, read_model
from arealite.ext.embedded.decode_loop import LoopCommand
from arealite.ext.embedded.protocol import RequestRefused
from arealite.ext.embedded.quantization import matrix_names, round_rows
from arealite.ext.embedded.served_adapters import DEFAULT, ServedAdapters, read_low_rank
from arealite.ext.embedded.staged_versions import is_staged_in_memory
from arealite.ext.models.fast_linear import BatchInvariantProducts, use_fast_linear
from arealite.ext.models.text_model import check_layers
from arealite.ext.weights.buckets import Layout
from arealite.ext.weights.updatable_tensors import PartialGroups, UpdatableTensors
from arealite.impl.engine.loading import DTYPES, attention_of
from arealite.impl.weights.tensor_names import Tensors, tensor_reader

FLOATS = {*DTYPES.values(), torch.float64}


class ServedWeights:
    """The tensors of a server's model under the names of its folder."""

    def __init__(
        self, model: PreTrainedModel, folder: Path | str, *, quantizes: bool = False
    ) -> None:
        """Read the headers of the folder that `model` was loaded from.

        Args:
            model: The model.
            folder: Its folder.
            quantizes: Whether weights of layers are rounded to int8, now and after each update.

        Raises:
            UserError: The folder has other tensors than the model.
        """
        self.model = model
        self.folder = Path(folder).expanduser()
        self.names = UpdatableTensors(model, self.folder)
        self.tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        headers = self.names.headers.items()
        shapes = {name: header.shape for name, header in headers}
        self._expected = ModelTensors(shapes=shapes, owner="the model")
        self.is_base = True
        """Whether the tensors are those of the folder; else an update has replaced them."""
        self._rounded = matrix_names(model) if quantizes else frozenset[str]()
        self._shared = set[str]()
        """The tensors that have the memory of a staged version."""
        for name in self._rounded:
            round_rows(self.tensors[name])

    @property
    def is_shared(self) -> bool:
        """Whether some tensors have the memory of a staged version."""
        return bool(self._shared)

    def write(self, name: str, tensor: torch.Tensor, *, may_share: bool = False) -> None:
        """Give a tensor of the model new numbers.

        Args:
            name: The name of the model's tensor.
            tensor: The numbers.
            may_share: Whether the model may use the memory of `tensor`. It does if dtype and device
                are equal, and the tensor is contiguous and is not rounded. Otherwise the numbers
                are copied.
        """
        target = self.tensors[name]
        is_rounded = name in self._rounded
        has_same_kind = (tensor.dtype, tensor.device) == (target.dtype, target.device)
        if may_share and has_same_kind and not is_rounded and tensor.is_contiguous():
            target.data = tensor
            self._shared.add(name)
            return
        if name in self._shared:  # a copy into mapped memory would keep the files' memory, too
            target.data = torch.empty_like(target)
            self._shared.discard(name)
        target.copy_(tensor)
        if is_rounded:
            round_rows(target)

    def target(
        self,
        name: str,
        shape: list[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the model's tensor that contains a tensor of the folder, whole or as a part.

        Raises:
            RequestRefused: The folder lacks the tensor, or its shape or kind of number differs.
        """
        mismatch = self._expected.mismatch(name, shape)
        if mismatch:
            raise RequestRefused(f"Failed to update weights: {mismatch}.")
        target = self.tensors[self.names.target(name)]
        is_float = dtype in FLOATS
        if target.is_floating_point() != is_float:
            raise RequestRefused(
                f"Failed to update weights: '{name}' has dtype {dtype}, the model {target.dtype}."
            )
        return target


def stage_weights(weights: ServedWeights, path: str) -> LoopCommand:
    """Check a folder of safetensors against the tensors of a model.

    Returns:
        A function that loads everything into the model. The tensors are mapped from the files. A
        version that a publisher of this host has staged in memory is not copied.

    Raises:
        RequestRefused: The folder or a tensor does not fit; the model is untouched.
    """
    tensors = _read_folder(path)
    for name in weights.names.unused:
        tensors.pop(name, None)
    may_share = is_staged_in_memory(Path(path))
    write = stage_tensors(weights, [*tensors.items()], {}, may_share=may_share)
    missing = weights.names.missing({*tensors})
    if missing:
        raise RequestRefused(f"Failed to update weights: {path} lacks {', '.join(missing[:5])}.")

    def load() -> None:
        had_own_memory = not weights.is_shared
        write()
        if had_own_memory and weights.is_shared:
            return_free_memory()

    return load


def is_adapter(path: str) -> bool:
    """Return whether a folder has an adapter that peft wrote."""
    return (Path(path) / "adapter_config.json").is_file()


def check_base(weights: ServedWeights, path: str) -> None:
    """Check that an adapter is of the model folder that the server was started with.

    Raises:
        RequestRefused: It is of another one.
    """
    base = read_json(Path(path), "adapter_config.json").get("base_model_name_or_path")
    if not base or Path(base).resolve() != weights.folder.resolve():
        raise RequestRefused(
            f"Failed to load adapter: it is of {base}, but the server serves {weights.folder}."
        )


def stage_adapter(
    weights: ServedWeights,
    adapters: ServedAdapters,
    path: str,
) -> LoopCommand:
    """Check the folder of an adapter for the model that the server was started with.

    Returns:
        A function that makes it the adapter of requests that name none. The base weights are loaded
        again if an update has replaced them.

    Raises:
        RequestRefused: The adapter does not fit, or is of another model folder.
    """
    low_rank_by_layer = read_low_rank(weights.model, Path(path))
    check_base(weights, path)
    if not weights.is_base and adapters.names - {DEFAULT}:
        raise RequestRefused("Failed to load adapter: unload the adapters with a name first.")
    reload = None if weights.is_base else stage_weights(weights, str(weights.folder))

    def load() -> None:
        if reload is not None:
            reload()
            weights.is_base = True
        adapters.load(DEFAULT, low_rank_by_layer)

    return load


def stage_tensors(
    weights: ServedWeights,
    named: list[Named],
    parts: PartialGroups,
    *,
    is_last: bool = False,
    may_share: bool = False,
) -> LoopCommand:
    """Check tensors, which may be a part of the model; return a function that loads them.

    Args:
        weights: The tensors to be replaced.
        named: The new tensors, under the folder's names.
        parts: The tensors of this update whose groups are incomplete; the function changes it.
        is_last: Whether no tensors follow.
        may_share: See `ServedWeights.write`.

    Raises:
        RequestRefused: A tensor does not fit, or a group is incomplete; the model is untouched.
    """
    for name, tensor in named:
        target = weights.target(name, list(tensor.shape), tensor.dtype)
        _check_finite(name, tensor, target)
    if is_last:
        received_names = {name for name, _ in named}.union(*parts.values())
        missing = weights.names.missing(received_names, whole=False)
        if missing:
            raise RequestRefused(
                f"Failed to update weights: not received: {', '.join(missing[:5])}."
            )

    def load() -> None:
        with torch.no_grad():
            for name, tensor in weights.names.to_model(named, parts):
                weights.write(name, tensor, may_share=may_share)

    return load


def check_layout(weights: ServedWeights, layout: Layout) -> None:
    """Check the description of tensors before they are received.

    Raises:
        RequestRefused: A tensor would not fit.
    """
    num_names = len(layout.names)
    has_repeated_names = len(set(layout.names)) != num_names
    if has_repeated_names or not num_names == len(layout.dtypes) == len(layout.shapes):
        raise RequestRefused(
            "Failed to receive weights: "
            "names, dtypes and shapes differ in length, or a name is repeated."
        )
    for name, dtype_name, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise RequestRefused(
                f"Failed to receive weights: '{name}' has no dtype of torch: {dtype_name!r}."
            )
        weights.target(name, shape, dtype)


def _check_finite(name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Refuse numbers that are not finite in the model's dtype: every answer would fail."""
    if not target.is_floating_point() or not tensor.numel():
        return
    low, high = torch.aminmax(tensor)  # both are NaN if any number is; half the time of a copy
    largest = max(-low, high)
    is_finite = largest <= torch.finfo(target.dtype).max  # False for NaN
    if not is_finite:
        raise RequestRefused(f"Failed to update weights: '{name}' is not finite in {target.dtype}.")


def _read_folder(path: str) -> Tensors:
    """Return the tensors of a folder, mapped into memory; refuse other kinds of files unopened."""
    try:
        os.listdir(path)
        headers = read_headers(Path(path))
        with tensor_reader(headers) as read:
            tensors = {name: read(name) for name in headers}
    except Exception as error:  # a folder may have any content
        reason = getattr(error, "strerror", None) or error  # without the path, which may be long
        raise RequestRefused(f"Failed to get weights iterator: {path[:200]!r}: {reason}") from error
    if not tensors:
        raise RequestRefused(f"Failed to get weights iterator: no safetensors in {path}.")
    return tensors


def load_model(
    path: str,
    *,
    dtype: str,
    device: str,
    batch_invariant: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """Return (model in evaluation mode, tokenizer) of a Hugging Face folder.

    Args:
        path: The folder.
        dtype: Of the weights.
        device: Of the model; see `pick_device`.
        batch_invariant: Whether a row may not depend on the rows beside it.

    Raises:
        UserError: There is no such model, or this server cannot run it.
    """
    config, _ = read_model(path)
    folder = Path(path).expanduser()
    if dtype not in DTYPES:
        raise UserError(f"model.dtype={dtype}: must be one of {', '.join(DTYPES)}.")
    check_layers(config, path)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        attention = attention_of(AutoConfig.from_pretrained(folder))
        options: Any = {"attn_implementation": attention}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            **options,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # each model fails in its own way
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"model.path={path}: cannot be loaded: {reason:.300}") from error
    UpdatableTensors(loaded, folder)  # transformers fills missing tensors with random numbers
    model = loaded.to(pick_device(device))
    model = model.eval().requires_grad_(False)
    use_fast_linear(model, BatchInvariantProducts() if batch_invariant else None)
    return model, tokenizer


def pick_device(device: str) -> str:
    """Resolve "auto" to the device of this machine.

    Raises:
        UserError: `device` is a GPU, and there is none.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"llm_server.embedded.device={device}: no GPU here. Use auto or cpu.")
    return device
