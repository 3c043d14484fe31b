"""The losses that a client names. Each is a sum over all tokens; a mean is the client's business.

Formulas: the service's public documentation, "Loss functions". It does not say the clipping range
of GSPO; ours is that of the paper (arXiv 2507.18071, section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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


class NamedLoss(NamedTuple):
    """A loss, the inputs that a datum must have for it, and its options."""

    terms: Callable[[LossInput, Options], Tensor]
    """Returns the loss of each target. The input has the `logprobs` of the targets, 0 where there
    is none, as [N] or [N, K], and fields of this shape."""
    inputs: tuple[str, ...]
    options: Options = MappingProxyType({})
    """The options with their defaults."""


def cross_entropy(batch: LossInput, options: Options) -> Tensor:
    """Return −w · log p."""
    return -batch.fields["weights"] * batch.outputs["logprobs"]


def importance_sampling(batch: LossInput, options: Options) -> Tensor:
    """Return −r · A with r = p / q, the ratio of policy and sampler."""
    return -_log_ratio(batch).exp() * batch.fields["advantages"]


def ppo(batch: LossInput, options: Options) -> Tensor:
    """Return −min(r · A, clip(r, low, high) · A)."""
    return _pessimistic(_log_ratio(batch).exp(), batch, options)


def cispo(batch: LossInput, options: Options) -> Tensor:
    """Return −clip(r, low, high) · A · log p, without gradient through the clipped ratio."""
    clipped = _clip(_log_ratio(batch).detach().exp(), options)
    return -clipped * batch.fields["advantages"] * batch.outputs["logprobs"]


def dro(batch: LossInput, options: Options) -> Tensor:
    """Return −(log p · A − beta/2 · (log p − log q)²)."""
    penalty = 0.5 * options["beta"] * _log_ratio(batch).square()
    return penalty - batch.outputs["logprobs"] * batch.fields["advantages"]


def gspo(batch: LossInput, options: Options) -> Tensor:
    """Return −min(s · A, clip(s, low, high) · A).

    s has the value of the datum's ratio, and the gradient of the token's own log p. The log of the
    ratio is the mean of log p − log q over the targets of the datum that SEQUENCE_MASK marks.
    """
    log_ratio = _log_ratio(batch)
    is_marked = (batch.fields[SEQUENCE_MASK] != 0) & (batch.fields[HAS_TARGET] > 0)
    sums_N = _sum_of_rows(log_ratio.detach().where(is_marked, 0.0), batch.rows_N)
    mean_N = sums_N / _sum_of_rows(is_marked.to(sums_N.dtype), batch.rows_N)
    mean = mean_N if log_ratio.dim() == 1 else mean_N[:, None]
    return _pessimistic((mean + (log_ratio - log_ratio.detach())).exp(), batch, options)


def _log_ratio(batch: LossInput) -> Tensor:
    return batch.outputs["logprobs"] - batch.fields["logprobs"]


def _pessimistic(
    ratio: Tensor,
    batch: LossInput,
    options: Options,
) -> Tensor:
    advantages = batch.fields["advantages"]
    return -(ratio * advantages).minimum(_clip(ratio, options) * advantages)


def _clip(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


def _sum_of_rows(values: Tensor, rows_N: Tensor) -> Tensor:
    """Return for each place the sum of the values of its datum, [N]."""
    values_N = values.flatten(1).sum(1) if values.dim() > 1 else values
    num_rows = int(rows_N.max()) + 1
    return values_N.new_zeros(num_rows).index_add(0, rows_N, values_N)[rows_N]


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
    """The loss function of a call, for the engine. It can be sent to other ranks."""

    def __init__(self, name: str, options: Options, *, uses_top_ids: bool) -> None:
        self._name = name
        self._options = options
        self._output = "top_logprobs" if uses_top_ids else "logprobs"

    @property
    def recorded(self) -> dict[str, str]:
        """{output of the engine: field of the rows that gets it}."""
        return {self._output: OUTPUT}

    def __call__(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch, and its sum as a stat."""
        has_target = batch.fields[HAS_TARGET] > 0
        logprobs = batch.outputs[self._output].where(has_target, 0.0)
        terms = find_loss(self._name).terms(
            replace(batch, outputs={"logprobs": logprobs}), self._options
        )
        loss = terms.where(has_target, 0.0).sum()
        return loss, {"loss": loss.detach()}
