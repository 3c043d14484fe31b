"""Finds how a language model computes its logits from the product with its head's weight.

Families scale or cap their logits in their own code. A probe of that code finds the change, so no
list of families or config fields is needed, and an unknown change is refused.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from arealite.algo.logprobs import LogitChange
from arealite.base.errors import UserError, one_line

PROBES, WIDEST = 4, 100.0
"""Positions of a probe, and the standard deviation of its largest logits."""


class _Decoded(BaseModelOutputWithPast):
    """Output of the decoder's stub. Fields that only some families read are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def decoder_of(module: Any) -> Any:
    """Return the part of a causal language model that ends before its head."""
    found = module.get_decoder()
    return getattr(module, "model", found) if found is module else found


def logit_change(module: Any) -> LogitChange:
    """Return the change that the model's forward makes to `hidden · weightᵀ + bias`.

    The forward runs once, with stubs in place of the decoder and of the head: no weight is read,
    and parameters may be on the meta device.

    Raises:
        UserError: The head is no linear layer, it does not get the decoder's output, or the change
            is neither a scale nor a softcap.
    """
    name = type(module).__name__
    head = module.get_output_embeddings()
    decoder = decoder_of(module)
    if type(head) is not nn.Linear:
        raise UserError(f"{name} has no linear output head ({type(head).__name__}): not supported.")
    base = next((part for part in module.children() if decoder in part.modules()), None)
    if base is None:
        raise UserError(f"{name} has no decoder of its own: not supported.")
    generator = torch.Generator().manual_seed(0)
    vocabulary, width = head.weight.shape
    hidden = torch.randn(1, PROBES, width, generator=generator, dtype=torch.float64)
    ramp = torch.logspace(-3, 0, PROBES, dtype=torch.float64)[:, None] * WIDEST
    raw = torch.randn(1, PROBES, vocabulary, generator=generator, dtype=torch.float64) * ramp
    raw[0, 0, 0] = 2.0**-20
    raw[0, -1, -1] = 2.0**40  # they show the slope at 0, and the cap
    given = list[Tensor]()

    def product(states: Tensor) -> Tensor:
        given.append(states)
        return raw.clone()

    decoded = _Decoded(last_hidden_state=hidden)
    with ExitStack() as stack, torch.no_grad():
        for part in {base, decoder}:
            stack.enter_context(_forward(part, lambda *_, **__: decoded))
        stack.enter_context(_forward(head, product))
        try:
            got = module(input_ids=torch.zeros(1, PROBES, dtype=torch.long), use_cache=False).logits
            before = _snapped(given[0].flatten()[0] / hidden.flatten()[0])
        except Exception as error:  # code of any model, with stubs
            what = f"The output head of {name} cannot be checked: {one_line(error):.200}"
            raise UserError(what) from error
    is_same = before and _close(given[0], before * hidden)
    if not is_same or (before != 1.0 and head.bias is not None):
        raise UserError(f"{name} changes the decoder's output before its head: not supported.")
    scale = _snapped(got[0, 0, 0] / raw[0, 0, 0])
    bound = float(got[0, -1, -1])
    softcap = bound if abs(bound) < abs(0.5 * scale * float(raw[0, -1, -1])) else 0.0
    if not scale or not _close(got, LogitChange(scale, softcap).apply(raw.clone())):
        raise UserError(f"{name} changes its logits in a way that is not supported.")
    return LogitChange(scale * before, softcap)


def _snapped(ratio: Tensor) -> float:
    """Return a ratio as a float; 1 if it is within 1e-6 of 1, the error of float32 rounding."""
    return 1.0 if abs(float(ratio) - 1.0) < 1e-6 else float(ratio)


def _close(tensor: Tensor, expected: Tensor) -> bool:
    same = tensor.shape == expected.shape
    return same and torch.allclose(tensor.double(), expected, rtol=1e-5, atol=1e-9)


@contextmanager
def _forward(module: Any, forward: Any) -> Iterator[None]:
    """Replace the forward of one module within the context."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
