"""Lets a model compute in another dtype without a second copy of its weights."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast the weights of a model to `dtype` while it computes; its own weights do not change.

    A layer is cast when its forward pass begins, and its casts are dropped when the pass ends. So
    the casts of one layer exist at a time, and those of the weights outside of layers. Buffers are
    cast only to float32: rotary frequencies stay exact in every dtype.
    """
    layers = list(_layers(model))
    ids_in_layers = set[int]()
    for layer in layers:
        ids_in_layers.update(id(tensor) for tensor in _weights(layer, dtype))
    weights = _weights(model, dtype)
    outside_layers = [tensor for tensor in weights if id(tensor) not in ids_in_layers]
    with ExitStack() as stack:
        stack.enter_context(_cast(outside_layers, dtype))
        for layer in layers:
            casts = stack.enter_context(ExitStack())

            def begin(
                layer: nn.Module,
                _: Any,
                casts: ExitStack = casts,
            ) -> None:
                layer_weights = _weights(layer, dtype)
                casts.enter_context(_cast(layer_weights, dtype))

            def end(*_: Any, casts: ExitStack = casts) -> None:
                casts.close()

            begin_hook = layer.register_forward_pre_hook(begin)
            end_hook = layer.register_forward_hook(end)
            stack.callback(begin_hook.remove)
            stack.callback(end_hook.remove)
        yield


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of each list of modules that is in no other list."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def _weights(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Return the floating-point tensors of a module that are cast to `dtype`."""
    tensors: list[Tensor] = [*module.parameters()]
    if dtype == torch.float32:
        tensors += module.buffers()
    return [tensor for tensor in tensors if tensor.is_floating_point()]


@contextmanager
def _cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Cast the values of tensors within the context."""
    originals = [(tensor, tensor.data) for tensor in tensors]
    for tensor, values in originals:
        tensor.data = values.to(dtype)
    try:
        yield
    finally:
        for tensor, values in originals:
            tensor.data = values
