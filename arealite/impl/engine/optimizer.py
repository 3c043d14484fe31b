"""AdamW or SGD, with a clip by the global norm that skips updates with non-finite gradients.

The norm is reduced over all ranks first, so every rank takes the same decision.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from arealite.api.engine import Training
from arealite.api.engine_config import OptimizerConfig
from arealite.base.errors import InvariantError, UserError
from arealite.base.log import get

log = get(__name__)
FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
GROWTH_UPDATES = 2000


class LossScale:
    """The factor of the loss that keeps float16 gradients in range, as torch.amp.GradScaler's.

    It doubles after GROWTH_UPDATES finite updates, and halves after one that is not finite.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.clean = 0
        self.value = FIRST_SCALE if enabled else 1.0

    def update(self, *, finite: bool) -> bool:
        """Set the scale after an update; return whether it was halved."""
        if not self.enabled:
            return False
        self.clean = self.clean + 1 if finite else 0
        before = self.value
        if self.clean == GROWTH_UPDATES:
            self.clean = 0
            self.value = min(LARGEST_SCALE, 2 * before)
        elif not finite:
            self.value = max(1.0, before / 2)
        return self.value < before


class Optimizer:
    """One optimizer and its schedule; `updates` counts applied updates, `skipped` the updates that
    were skipped since the last applied one. Gradients are those of the loss times `scale`."""

    _torch: optim.Optimizer

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        training: Training,
        *,
        scales_loss: bool = False,
    ) -> None:
        """Make the state of all parameters.

        Args:
            parameters: By their names in checkpoints.
            training: Optimizer and schedule.
            scales_loss: Whether the loss is scaled, for float16.
        """
        self.updates = 0
        self.skipped = 0
        self.scale = LossScale(enabled=scales_loss)
        self._training = training
        self.parameters = parameters
        params = parameters.values()
        self._copies = _num_copies(next(iter(params)))
        # Weight decay is applied here: torch's SGD would add it to the momentum.
        self._matrices = [param for param in params if param.ndim > 1]
        config = training.optimizer
        if config.type == "sgd":
            self._torch = optim.SGD(
                params,
                training.lr,
                momentum=config.beta1,
                foreach=True,
            )
            moments = ["momentum_buffer"] if config.beta1 else []
        else:
            self._torch = optim.AdamW(
                params,
                lr=training.lr,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                weight_decay=0.0,
                fused=True,
            )
            moments = ["step", "exp_avg", "exp_avg_sq"]
        for param in params:
            # Created here, not at the first step, so that every checkpoint has the same tensors.
            self._torch.state[param] = {key: _zero_state(key, param) for key in moments}

    def step(
        self,
        lr: float | None = None,
        config: OptimizerConfig | None = None,
    ) -> dict[str, float]:
        """Clip, update and clear the gradients; return grad_norm, lr and skipped_update.

        If the norm is not finite, parameters, moments and schedule do not change. In float16 the
        loss scale halves then, and the result has `loss_scale`; only skipped updates at the scale 1
        count towards `max_skipped_updates`.

        Args:
            lr: The learning rate; None: that of the schedule.
            config: Options from now on; None: the current ones.

        Raises:
            UserError: No parameter has a gradient, or `config` is of another type.
            InvariantError: `max_skipped_updates` updates in a row had non-finite gradients.
        """
        if config is not None:
            self._use(config)
        training = self._training
        if lr is None:
            lr = learning_rate(
                self.updates,
                lr=training.lr,
                total=training.total_updates,
                config=training.optimizer,
            )
        gradients = self._gradients()
        if not gradients:
            raise UserError("optim_step: there is no gradient. Call forward_backward before it.")
        scale = self.scale.value
        norm = _global_norm(gradients, copies=self._copies) / scale
        is_finite = math.isfinite(norm)
        if is_finite:
            self._clip_and_unscale(gradients, norm)
            self._decay_weights(lr)
            self._apply(lr)
        is_overflow = self.scale.update(finite=is_finite)
        self.skipped = 0 if is_finite or is_overflow else self.skipped + 1
        self.drop_gradient()
        max_skipped = training.optimizer.max_skipped_updates
        if 0 < max_skipped <= self.skipped:
            raise InvariantError(self._skipped_text(norm, lr))
        if not is_finite:
            log.warning(
                "update skipped",
                reason="gradient norm not finite",
                loss_scale=self.scale.value if self.scale.enabled else None,
            )
        stats = {"loss_scale": scale} if self.scale.enabled else {}
        return stats | {
            "grad_norm": norm,
            "lr": lr,
            "skipped_update": float(not is_finite),
        }

    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's shards of the gradients."""
        params = self.parameters.values()
        return [_local(param.grad) for param in params if param.grad is not None]

    def _use(self, config: OptimizerConfig) -> None:
        """Take other options of the same type of optimizer."""
        own_type = self._training.optimizer.type
        if config.type != own_type:
            raise UserError(f"optim_step: optimizer.type={config.type}: it is {own_type}.")
        self._training = replace(self._training, optimizer=config)
        for group in self._torch.param_groups:
            if config.type == "sgd":
                group["momentum"] = config.beta1
            else:
                group["betas"] = (config.beta1, config.beta2)
                group["eps"] = config.eps

    def drop_gradient(self) -> None:
        """Clear the gradients of all parameters."""
        self._torch.zero_grad(set_to_none=True)

    def _clip_and_unscale(self, gradients: list[torch.Tensor], norm: float) -> None:
        """Divide gradients by the loss scale, and limit their global norm."""
        limit = self._training.optimizer.clip_grad_norm
        factor = limit / norm if 0 < limit < norm else 1.0
        factor = factor / self.scale.value
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)

    def _decay_weights(self, lr: float) -> None:
        weight_decay = self._training.optimizer.weight_decay
        if not weight_decay or not lr:
            return
        for matrix in self._matrices:
            # Text gives no gradient to layers that read images: they must not change.
            if matrix.grad is not None:
                _local(matrix.detach()).mul_(1.0 - lr * weight_decay)

    def _apply(self, lr: float) -> None:
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()
        self.updates += 1

    def _skipped_text(self, norm: float, lr: float) -> str:
        """Return the text of the error after too many skipped updates."""
        param_state = "finite"
        for name, param in self.parameters.items():
            if not _local(param).isfinite().all():
                param_state = f"not finite, as {name}"
                break
        return (
            f"{self.skipped} updates in a row were skipped, after {self.updates} applied ones: "
            f"the gradient norm is {norm}, parameters are {param_state}. "
            f"Probably the learning rate ({lr:g}) is too high: "
            "resume from an older checkpoint with a lower one. (optimizer.max_skipped_updates)"
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return moments and step counts by `<parameter>.<key>`; loading writes into them."""
        tensors = dict[str, torch.Tensor]()
        for name, param in self.parameters.items():
            for key, tensor in self._torch.state[param].items():
                tensors[f"{name}.{key}"] = tensor
        return tensors


def _num_copies(param: nn.Parameter) -> int:
    """Return how many copies of a parameter, or of its shards, all ranks hold together."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return dist.get_world_size()
    return mesh.size(0) if mesh.ndim == 2 else 1


def _zero_state(key: str, param: nn.Parameter) -> torch.Tensor:
    """Return a moment of a parameter, or its number of steps, before the first step."""
    if key == "step":
        return torch.zeros((), dtype=torch.float32, device=param.device)
    return torch.zeros_like(param)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def _global_norm(shards: list[torch.Tensor], *, copies: int) -> float:
    """Return the norm of the shards of all ranks, which hold `copies` copies of each."""
    squares = torch.stack([shard.float().square().sum() for shard in shards])
    square = squares.sum(dtype=torch.float64) / copies
    if dist.get_world_size() > 1:
        dist.all_reduce(square)
    if not torch.isfinite(square):
        return math.inf
    return math.sqrt(float(square))


def learning_rate(
    update: int,
    *,
    lr: float,
    total: int,
    config: OptimizerConfig,
) -> float:
    """Return the learning rate of an optimizer update.

    A linear warm-up over `warmup_steps` updates begins at lr / warmup_steps. Then the rate is
    constant, or a linear or cosine decay reaches lr · min_lr_ratio at the last update.

    Args:
        update: Number of the update, from 0.
        lr: The learning rate after the warm-up.
        total: Number of updates; later ones keep the last rate.
        config: Options of the schedule.
    """
    warmup = config.warmup_steps
    if update < warmup:
        return lr * (update + 1) / warmup
    if config.schedule == "constant":
        return lr
    num_decays = max(1, total - 1 - warmup)
    progress = min(1.0, (update - warmup) / num_decays)
    if config.schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    min_ratio = config.min_lr_ratio
    return lr * (min_ratio + (1.0 - min_ratio) * share)
