"""Finds how a language model computes its logits from the product with its head's weight.

Families scale or cap their logits in their own code. A probe of that code finds the change, so no
list of families or config fields is needed, and an unknown change is refused.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from arealite.algo.logprobs import LogitChange
from arealite.base.errors import UserError, one_line
from arealite.impl.engine.model import decoder_of

PROBES = 4
"""Positions of a probe."""
WIDEST = 100.0
"""Standard deviation of the largest logits of a probe."""
SMALL_LOGIT = 2.0**-20
"""First logit of the first position: it shows the slope at 0."""
LARGE_LOGIT = 2.0**40
"""Last logit of the last position: it shows the cap."""


class _Decoded(BaseModelOutputWithPast):
    """Output of the decoder's stub. Fields that only some families read are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Probe(NamedTuple):
    """Outputs of the stubs; V is the vocabulary and H the hidden size."""

    hidden: Tensor
    """float64 [1, PROBES, H]: the output of the decoder."""
    product: Tensor
    """float64 [1, PROBES, V]: the output of the head."""

    @classmethod
    def draw(cls, vocabulary: int, width: int) -> "_Probe":
        generator = torch.Generator().manual_seed(0)
        ramp = torch.logspace(-3, 0, PROBES, dtype=torch.float64)[:, None] * WIDEST

        def normal(size: int) -> Tensor:
            return torch.randn(1, PROBES, size, generator=generator, dtype=torch.float64)

        hidden = normal(width)
        product = normal(vocabulary) * ramp
        product[0, 0, 0] = SMALL_LOGIT
        product[0, -1, -1] = LARGE_LOGIT
        return cls(hidden, product)


def logit_change(module: Any) -> LogitChange:
    """Return the change that the model's forward makes to `hidden · weightᵀ + bias`.

    This function is the hook `logit_change`.

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
    vocabulary, width = head.weight.shape
    probe = _Probe.draw(vocabulary, width)
    try:
        head_input, logits = _run(module, {base, decoder}, head, probe)
        input_scale = _snapped(head_input.flatten()[0] / probe.hidden.flatten()[0])
    except Exception as error:  # code of any model, with stubs
        raise UserError(
            f"The output head of {name} cannot be checked: {one_line(error):.200}"
        ) from error
    is_scaled = input_scale != 0.0 and _close(head_input, input_scale * probe.hidden)
    # The product is scaled with its input, but a bias is not.
    if not is_scaled or (input_scale != 1.0 and head.bias is not None):
        raise UserError(f"{name} changes the decoder's output before its head: not supported.")
    change = _change_between(probe.product, logits)
    if change.scale == 0.0 or not _close(logits, change.apply(probe.product.clone())):
        raise UserError(f"{name} changes its logits in a way that is not supported.")
    return change._replace(scale=change.scale * input_scale)


def _run(
    module: Any,
    decoders: set[Any],
    head: Any,
    probe: _Probe,
) -> tuple[Tensor, Tensor]:
    """Run the forward of a model with stubs; return the input of its head, and its logits."""
    head_inputs = list[Tensor]()

    def product(states: Tensor) -> Tensor:
        head_inputs.append(states)
        return probe.product.clone()

    decoded = _Decoded(last_hidden_state=probe.hidden)
    with ExitStack() as stack, torch.no_grad():
        for decoder in decoders:
            stack.enter_context(_forward(decoder, lambda *_, **__: decoded))
        stack.enter_context(_forward(head, product))
        input_ids = torch.zeros(1, PROBES, dtype=torch.long)
        output = module(input_ids=input_ids, use_cache=False)
    return head_inputs[0], output.logits


def _change_between(product: Tensor, logits: Tensor) -> LogitChange:
    """Return the scale that the smallest logit shows, and the cap that the largest one shows."""
    scale = _snapped(logits[0, 0, 0] / product[0, 0, 0])
    largest = float(logits[0, -1, -1])
    is_capped = abs(largest) < abs(0.5 * scale * LARGE_LOGIT)
    return LogitChange(scale=scale, softcap=largest if is_capped else 0.0)


def _snapped(ratio: Tensor) -> float:
    """Return a ratio as a float; 1 if it is within 1e-6 of 1, the error of float32 rounding."""
    return 1.0 if abs(float(ratio) - 1.0) < 1e-6 else float(ratio)


def _close(tensor: Tensor, expected: Tensor) -> bool:
    if tensor.shape != expected.shape:
        return False
    return torch.allclose(tensor.double(), expected, rtol=1e-5, atol=1e-9)


@contextmanager
def _forward(module: Any, forward: Any) -> Iterator[None]:
    """Replace the forward of one module within the context."""
    replaced = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if replaced is not None:
            module.forward = replaced
