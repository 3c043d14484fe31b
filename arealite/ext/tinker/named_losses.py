"""The losses that a client names. Each is a sum over all tokens; a mean is the client's business.

Formulas: the service's public documentation, "Loss functions". Shapes: N loss tokens; with several
targets for a place, [N, K].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from arealite.base.errors import UserError
from arealite.base.registry import unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from arealite.api.engine import LossInput

LossInputs = Mapping[str, "Tensor"]
Options = Mapping[str, float]


class NamedLoss(NamedTuple):
    """A loss, the inputs that a datum must have for it, and its options."""

    terms: Callable[[Tensor, LossInputs, Options], Tensor]
    """(logprobs of the targets, inputs, options) → the loss of each token."""
    inputs: tuple[str, ...]
    options: Options = MappingProxyType({})
    """The options with their defaults."""


def cross_entropy(logprobs: Tensor, inputs: LossInputs, options: Options) -> Tensor:
    """Return −w · log p."""
    return -inputs["weights"] * logprobs


def importance_sampling(logprobs: Tensor, inputs: LossInputs, options: Options) -> Tensor:
    """Return −r · A with r = p / q, the ratio of policy and sampler."""
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: LossInputs, options: Options) -> Tensor:
    """Return −min(r · A, clip(r, low, high) · A)."""
    ratio = _ratio(logprobs, inputs)
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    advantages = inputs["advantages"]
    return -(ratio * advantages).minimum(clipped * advantages)


def cispo(logprobs: Tensor, inputs: LossInputs, options: Options) -> Tensor:
    """Return −clip(r, low, high) · A · log p, without gradient through the clipped ratio."""
    ratio = _ratio(logprobs, inputs).detach()
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -clipped * inputs["advantages"] * logprobs


def dro(logprobs: Tensor, inputs: LossInputs, options: Options) -> Tensor:
    """Return −(log p · A − beta/2 · (log p − log q)²)."""
    difference = logprobs - inputs["logprobs"]
    penalty = 0.5 * options["beta"] * difference.square()
    return penalty - logprobs * inputs["advantages"]


def _ratio(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


POLICY_INPUTS = ("logprobs", "advantages")
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": NamedLoss(cross_entropy, ("weights",)),
    "importance_sampling": NamedLoss(importance_sampling, POLICY_INPUTS),
    "ppo": NamedLoss(ppo, POLICY_INPUTS, CLIP),
    "cispo": NamedLoss(cispo, POLICY_INPUTS, CLIP),
    "dro": NamedLoss(dro, POLICY_INPUTS, {"beta": 0.05}),
}


def find_loss(name: str) -> NamedLoss:
    """Return a loss.

    Raises:
        UserError: This service does not compute it.
    """
    loss = LOSSES.get(name)
    if loss is None:
        raise UserError(f"{unknown('loss_fn', name, [*LOSSES])} Or use forward_backward_custom.")
    return loss


def options_of(name: str, sent: Mapping[str, float | str]) -> Options:
    """Return the options of a loss: those that the client sent, and defaults.

    Raises:
        UserError: One is unknown, or is no number.
    """
    defaults = find_loss(name).options
    for key, value in sent.items():
        if key not in defaults or isinstance(value, str):
            known = ", ".join(defaults) or "none"
            raise UserError(f"loss_fn_config.{key}={value}: the options of {name} are: {known}.")
    return {**defaults, **sent}  # type: ignore[dict-item]


OUTPUT = "target_logprobs"
"""The field of rows that gets the log-probabilities of the targets."""
HAS_TARGET = "has_target"
"""The field of rows that is 1.0 where there is a target."""


class SummedLoss:
    """The loss function of a call, for the engine."""

    def __init__(self, name: str, options: Options, *, uses_top_ids: bool) -> None:
        self._loss = find_loss(name)
        self._options = options
        self._output = "top_logprobs" if uses_top_ids else "logprobs"

    @property
    def recorded(self) -> dict[str, str]:
        """{output of the engine: field of the rows that gets it}."""
        return {self._output: OUTPUT}

    def __call__(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch, and its sum as a stat."""
        logprobs = batch.outputs[self._output]
        inputs = batch.fields
        has_target = inputs[HAS_TARGET] > 0
        terms = self._loss.terms(logprobs.where(has_target, 0.0), inputs, self._options)
        loss = terms.where(has_target, 0.0).sum()
        return loss, {"loss": loss.detach()}
