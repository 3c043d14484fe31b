"""The losses that a client names. Each is a sum over all tokens; a mean is the client's business.

Formulas: the service's public documentation, "Loss functions". It does not say the clipping range
of GSPO; ours is that of the paper (arXiv 2507.18071, section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from arealite.base.errors import UserError
from arealite.base.registry import unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from arealite.api.engine import LossInput

Options = Mapping[str, float]
SEQUENCE_MASK = "sequence_ratio_mask"


@dataclass(frozen=True, kw_only=True)
class TargetTokens:
    """The N places of a micro-batch that predict a token, with K targets each."""

    logprobs: Tensor
    """Of the targets, [N] or [N, K]; 0 where there is no target."""
    inputs: Mapping[str, Tensor]
    """What the client sent for the targets, and HAS_TARGET; shapes as `logprobs`."""
    rows_N: Tensor
    """The index of each place's datum."""

    @property
    def advantages(self) -> Tensor:
        """The advantages."""
        return self.inputs["advantages"]

    @property
    def log_ratios(self) -> Tensor:
        """log p − log q of policy and sampler."""
        return self.logprobs - self.inputs["logprobs"]


class NamedLoss(NamedTuple):
    """A loss, the inputs that a datum must have for it, and its options."""

    terms: Callable[[TargetTokens, Options], Tensor]
    """Returns the loss of each target."""
    inputs: tuple[str, ...]
    options: Options = MappingProxyType({})
    """The options with their defaults."""


def cross_entropy(targets: TargetTokens, options: Options) -> Tensor:
    """Return −w · log p."""
    return -targets.inputs["weights"] * targets.logprobs


def importance_sampling(targets: TargetTokens, options: Options) -> Tensor:
    """Return −r · A with r = p / q, the ratio of policy and sampler."""
    return -targets.log_ratios.exp() * targets.advantages


def ppo(targets: TargetTokens, options: Options) -> Tensor:
    """Return −min(r · A, clip(r, low, high) · A)."""
    return _lower_objective(targets.log_ratios.exp(), targets.advantages, options)


def cispo(targets: TargetTokens, options: Options) -> Tensor:
    """Return −clip(r, low, high) · A · log p, without gradient through the clipped ratio."""
    clipped = _clip(targets.log_ratios.detach().exp(), options)
    return -clipped * targets.advantages * targets.logprobs


def dro(targets: TargetTokens, options: Options) -> Tensor:
    """Return −(log p · A − beta/2 · (log p − log q)²)."""
    penalty = 0.5 * options["beta"] * targets.log_ratios.square()
    return penalty - targets.logprobs * targets.advantages


def gspo(targets: TargetTokens, options: Options) -> Tensor:
    """Return −min(s · A, clip(s, low, high) · A), s with the gradient of the token's own log p.

    log s is the mean of log p − log q over the targets of the datum that SEQUENCE_MASK marks.
    """
    is_marked = (targets.inputs[SEQUENCE_MASK] != 0) & (targets.inputs[HAS_TARGET] > 0)
    marked = targets.log_ratios.detach().where(is_marked, 0.0)
    num_marked = _sum_of_rows(is_marked.to(marked.dtype), targets.rows_N)
    mean_N = _sum_of_rows(marked, targets.rows_N) / num_marked
    mean = mean_N if marked.dim() == 1 else mean_N[:, None]
    own_gradient = targets.logprobs - targets.logprobs.detach()
    return _lower_objective((mean + own_gradient).exp(), targets.advantages, options)


def _sum_of_rows(values: Tensor, rows_N: Tensor) -> Tensor:
    """Return for each place the sum of the values of its datum, [N]."""
    values_N = values.flatten(1).sum(1) if values.dim() > 1 else values
    num_rows = int(rows_N.max()) + 1
    return values_N.new_zeros(num_rows).index_add(0, rows_N, values_N)[rows_N]


def _lower_objective(ratio: Tensor, advantages: Tensor, options: Options) -> Tensor:
    return -(ratio * advantages).minimum(_clip(ratio, options) * advantages)


def _clip(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


POLICY_INPUTS = ("logprobs", "advantages")
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": NamedLoss(cross_entropy, ("weights",)),
    "importance_sampling": NamedLoss(importance_sampling, POLICY_INPUTS),
    "ppo": NamedLoss(ppo, POLICY_INPUTS, CLIP),
    "cispo": NamedLoss(cispo, POLICY_INPUTS, CLIP),
    "dro": NamedLoss(dro, POLICY_INPUTS, {"beta": 0.05}),
    "gspo": NamedLoss(
        gspo,
        (*POLICY_INPUTS, SEQUENCE_MASK),
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    ),
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
        has_target = batch.fields[HAS_TARGET] > 0
        targets = TargetTokens(
            logprobs=batch.outputs[self._output].where(has_target, 0.0),
            inputs=batch.fields,
            rows_N=batch.rows_N,
        )
        terms = self._loss.terms(targets, self._options)
        loss = terms.where(has_target, 0.0).sum()
        return loss, {"loss": loss.detach()}
