"""The loss of a call: a name, options, or a function of the user; and the weights of its tokens."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from arealite.algo.losses import make_policy_loss
from arealite.algo.reduction import token_weights
from arealite.api.algorithm import KLConfig, LossConfig, objectives
from arealite.api.engine import LossFn, LossInput, Sequence
from arealite.api.engine_config import OptimizerConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.cli import configs, options
from arealite.ext.session.adapter_records import AdapterRecord

OwnLoss = Callable[[LossInput], Any]
"""Returns the loss, or (loss, stats) as a LossFn. The loss is the sum over tokens of a term times
`fields["loss_weight"]`."""
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss function, and what its rows need."""

    function: LossFn
    config: LossConfig
    """Its options; of an own loss only `reduction` has a meaning."""
    fields: tuple[str, ...] = ()
    """Fields that rows must have."""
    record_outputs: Mapping[str, str] | None = None
    """{output: field} of the pass that become fields, if the rows do not have them."""
    kl: KLConfig = KLConfig()
    own_function: OwnLoss | None = None
    """The function of the user; None: a loss by name."""

    def __reduce__(self) -> tuple[Callable[..., "Loss"], tuple[object, ...]]:
        """Return how another rank makes this loss: `function` itself cannot be sent."""
        return rebuild_loss, (self.own_function, self.config, self.kl, self.record_outputs)

    @property
    def function_name(self) -> str:
        """module:name of the function of the user; "": a loss by name."""
        if self.own_function is None:
            return ""
        module = getattr(self.own_function, "__module__", "")
        return f"{module}:{getattr(self.own_function, '__qualname__', '')}"

    @property
    def needs_reference(self) -> bool:
        """Whether the field `ref_logprobs` is needed."""
        return self.kl.coef > 0


def changed(config: C, call: str, changes: Mapping[str, object]) -> C:
    """Return options with changes, checked as those of a file.

    Args:
        config: The options.
        call: Name of the call, for errors.
        changes: New values by name.

    Raises:
        UserError: An option is unknown, of another type or out of range.
    """
    names = config_tree.field_names(config)
    for name in changes:
        if name not in names:
            raise UserError(f"{call}: there is no option {name!r}. Options: {', '.join(names)}.")
    try:
        ready = config_tree.build(type(config), config_tree.plain(config) | {**changes})
        config_tree.check_ranges(ready)
        config_tree.check_constraints(ready, "")
    except UserError as error:
        raise UserError(f"{call}: {error}") from error
    return ready


def changed_optimizer(config: OptimizerConfig, options: Mapping[str, object]) -> OptimizerConfig:
    """Return the options of an optimizer with changes of `optim_step`.

    Raises:
        UserError: See `changed`; or they are for another type.
    """
    ready = changed(config, "optim_step", options)
    if ready.type != config.type:
        raise UserError(f"optim_step: optimizer.type={ready.type}: it is {config.type}.")
    return ready


def make_loss(
    config: ExperimentConfig,
    loss: str | OwnLoss | None,
    changes: Mapping[str, object],
) -> Loss:
    """Return the loss of a call.

    Args:
        config: The session's options, of which `trainer.ppo.loss` is the default.
        loss: An objective (ppo, cispo, …), a preset (grpo, gspo, …), or a function of the user.
        changes: Options of the loss by name.

    Raises:
        UserError: There is no such loss or option, or it needs what a session does not compute.
    """
    ppo = config.trainer.ppo
    if callable(loss):
        if changes:
            raise UserError(f"forward_backward: {', '.join(changes)}: a function has no options.")
        return own_loss(loss, replace(ppo.loss, reduction="token_mean"))
    loss_config = ppo.loss
    kl = ppo.kl
    if loss is not None and loss in objectives.names():
        loss_config = replace(loss_config, objective=loss)
    elif loss is not None:
        files = [options.find_config("async_ppo"), options.find_config(f"algo/{loss}")]
        preset = configs.load(ExperimentConfig, files, []).trainer.ppo
        loss_config = preset.loss
        kl = preset.kl
    loss_config = changed(loss_config, "forward_backward", changes)
    _check_computed(loss_config, kl)
    return named_loss(loss_config, kl)


def named_loss(config: LossConfig, kl: KLConfig) -> Loss:
    """Return the loss with these options."""
    fields = ["advantages", "behav_logprobs"]
    if config.centering:
        fields.append("behav_top_logprobs")
    return Loss(
        function=make_policy_loss(config, kl),
        config=config,
        fields=tuple(fields),
        record_outputs={"logprobs": "prox_logprobs"} if config.decoupled else None,
        kl=kl,
    )


def own_loss(function: OwnLoss, config: LossConfig) -> Loss:
    """Return a loss of the user."""
    return Loss(function=_with_stats(function), config=config, own_function=function)


def rebuild_loss(
    function: OwnLoss | None,
    config: LossConfig,
    kl: KLConfig,
    record_outputs: Mapping[str, str] | None,
) -> Loss:
    """Return the loss that was made from these parts.

    Args:
        function: The function of the user; None: a loss by name.
        config: The options.
        kl: The KL penalty.
        record_outputs: See Loss.
    """
    loss = named_loss(config, kl) if function is None else own_loss(function, config)
    return replace(loss, record_outputs=record_outputs)


def _check_computed(loss: LossConfig, kl: KLConfig) -> None:
    """Refuse options that a trainer's other steps implement.

    Raises:
        UserError: The options are on.
    """
    if kl.coef and kl.place == "reward":
        raise UserError(
            "forward_backward: the preset adds a KL penalty to rewards, which a session does not. "
            "Subtract it from your rewards, and pass an objective such as loss='ppo'."
        )
    if loss.m2_threshold is not None:
        raise UserError(
            "forward_backward: m2_threshold masks tokens of a whole batch, which a session does "
            "not. Use another loss, or set the rows' loss_mask."
        )


def _with_stats(own_loss: OwnLoss) -> LossFn:
    """Return a function of the user as a LossFn."""

    def loss_fn(batch: LossInput) -> Any:
        result = own_loss(batch)
        if isinstance(result, tuple):
            return result
        return result, {"loss": result.detach()}

    return loss_fn


def weighted_rows(call: str, rows: Seq[Sequence], loss: Loss, *, max_tokens: int) -> list[Sequence]:
    """Return copies of rows that have all fields of a loss, with the default weights of tokens.

    The weights of an adapter's rows do not depend on the rows of other adapters.

    Args:
        call: The name of the call, for errors.
        rows: Its rows.
        loss: Its loss.
        max_tokens: Divisor of the reduction `seq_mean_token_sum`.

    Raises:
        UserError: Some rows lack a field that the loss or other rows have.
    """
    names = dict.fromkeys([*loss.fields, *(name for row in rows for name in row.fields)])
    for name in names:
        lacking = [index for index, row in enumerate(rows) if name not in row.fields]
        if lacking:
            raise UserError(
                f"{call}: row {lacking[0]} has no field {name!r}, which "
                f"{'the loss reads' if name in loss.fields else 'other rows have'}. "
                "Make rows with session.rows or sample.row, or set row.fields."
            )
    if "loss_weight" in names:
        return [replace(row, fields={**row.fields}) for row in rows]
    indices_by_adapter = dict[str, list[int]]()
    for index, row in enumerate(rows):
        indices_by_adapter.setdefault(row.adapter, []).append(index)
    weighted = [*rows]
    for indices in indices_by_adapter.values():
        lengths = [int(rows[index].loss_mask.sum()) for index in indices]
        weights = token_weights(loss.config.reduction, lengths, divisor=float(max_tokens))
        for index, weight in zip(indices, weights, strict=True):
            row = rows[index]
            weight_T = np.full(len(row.tokens), weight, np.float32)
            weighted[index] = replace(row, fields={**row.fields, "loss_weight": weight_T})
    return weighted


def check_staleness(
    rows: Seq[Sequence],
    records: Mapping[str, AdapterRecord],
    *,
    limit: int,
) -> None:
    """Refuse rows with loss tokens that are more than `limit` versions old.

    Raises:
        UserError: There are some.
    """
    for index, row in enumerate(rows):
        if "versions" not in row.fields or not row.loss_mask.any():
            continue
        oldest = int(row.fields["versions"][row.loss_mask].min())
        version = records[row.adapter].step
        if version - oldest > limit:
            raise UserError(
                f"forward_backward: row {index} has tokens of version {oldest}, and the "
                f"weights have version {version}: max_staleness={limit} is exceeded. "
                "Train samples earlier, sample fewer batches ahead, or raise max_staleness."
            )


def adapters_of(rows: Seq[Sequence]) -> list[str]:
    """Return the names of the adapters that compute rows.

    Raises:
        UserError: There are no rows.
    """
    if not rows:
        raise UserError("there are no rows. Pass at least one.")
    return [*dict.fromkeys(row.adapter for row in rows)]
