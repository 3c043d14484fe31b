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
    in_layers = {id(tensor) for layer in layers for tensor in _weights(layer, dtype)}
    outside = [tensor for tensor in _weights(model, dtype) if id(tensor) not in in_layers]
    with ExitStack() as stack:
        stack.enter_context(_cast(outside, dtype))
        for layer in layers:
            casts = stack.enter_context(ExitStack())

            def begin(layer: nn.Module, _: Any, casts: ExitStack = casts) -> None:
                casts.enter_context(_cast(_weights(layer, dtype), dtype))

            def end(*_: Any, casts: ExitStack = casts) -> None:
                casts.close()

            stack.callback(layer.register_forward_pre_hook(begin).remove)
            stack.callback(layer.register_forward_hook(end).remove)
        yield


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of each list of modules that is in no other list."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def _weights(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    buffers = module.buffers() if dtype == torch.float32 else ()
    return [each for each in (*module.parameters(), *buffers) if each.is_floating_point()]


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
