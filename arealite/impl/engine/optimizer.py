"""AdamW or SGD, with a clip by the global norm that skips updates with non-finite gradients.

The norm is reduced over all ranks first, so every rank takes the same decision.
"""

import math

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from arealite.algo.schedules import learning_rate
from arealite.api.engine import Training
from arealite.base.errors import InvariantError

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

    def __init__(self, model: nn.Module, training: Training, *, scales_loss: bool = False) -> None:
        self.updates = self.skipped = 0
        self.scale = LossScale(enabled=scales_loss)
        self._training = training
        config = training.optimizer
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        params = self._named.values()
        lr = training.lr
        mesh = getattr(next(iter(params)), "device_mesh", None)
        self._copies = mesh.size(0) if mesh is not None and mesh.ndim == 2 else 1
        # Weight decay is applied here: torch's SGD would add it to the momentum.
        self._matrices = [p for p in params if p.ndim > 1]
        if config.type == "sgd":
            self._torch = optim.SGD(params, lr, momentum=config.beta1, foreach=True)
            moments = ["momentum_buffer"] if config.beta1 else []
        else:
            betas = config.beta1, config.beta2
            self._torch = optim.AdamW(params, lr, betas, config.eps, weight_decay=0.0, fused=True)
            moments = ["step", "exp_avg", "exp_avg_sq"]
        for param in params:
            # Created here, not at the first step, so that every checkpoint has the same tensors.
            step = torch.zeros((), dtype=torch.float32, device=param.device)
            state = {key: step if key == "step" else torch.zeros_like(param) for key in moments}
            self._torch.state[param] = state

    def step(self) -> dict[str, float]:
        """Clip, update and clear the gradients; return grad_norm, lr and skipped_update.

        If the norm is not finite, parameters, moments and schedule do not change. In float16 the
        loss scale halves then, and the result has `loss_scale`; only skipped updates at the scale 1
        count towards `max_skipped_updates`.

        Raises:
            InvariantError: `max_skipped_updates` updates in a row had non-finite gradients.
        """
        training = self._training
        total = training.total_updates
        config = training.optimizer
        lr = learning_rate(self.updates, lr=training.lr, total=total, config=config)
        gradients = [_local(p.grad) for p in self._named.values() if p.grad is not None]
        scale = self.scale.value
        norm = _global_norm(gradients, copies=self._copies) / scale
        finite = math.isfinite(norm)
        if finite:
            limit = config.clip_grad_norm
            factor = (limit / norm if 0 < limit < norm else 1.0) / scale
            for gradient in gradients if factor != 1.0 else ():
                gradient.mul_(factor)
            for group in self._torch.param_groups:
                group["lr"] = lr
            if config.weight_decay and lr:
                # Text gives no gradient to layers that read images: they must not change.
                for matrix in (p for p in self._matrices if p.grad is not None):
                    _local(matrix.detach()).mul_(1.0 - lr * config.weight_decay)
            self._torch.step()
            self.updates += 1
        is_overflow = self.scale.update(finite=finite)
        self.skipped = 0 if finite or is_overflow else self.skipped + 1
        self._torch.zero_grad(set_to_none=True)
        if 0 < config.max_skipped_updates <= self.skipped:
            bad = (name for name, p in self._named.items() if not _local(p).isfinite().all())
            found = f"not finite, as {name}" if (name := next(bad, "")) else "finite"
            what = f"{self.skipped} updates in a row were skipped, after {self.updates} applied"
            what += f" ones: the gradient norm is {norm}, parameters are {found}"
            fix = f"Probably the learning rate ({lr:g}) is too high: resume from an older"
            fix += " checkpoint with a lower one. (optimizer.max_skipped_updates)"
            raise InvariantError(f"{what}. {fix}")
        stats = {"loss_scale": scale} if self.scale.enabled else {}
        return stats | {"grad_norm": norm, "lr": lr, "skipped_update": float(not finite)}

    def state(self) -> dict[str, torch.Tensor]:
        """Return moments and step counts by `<parameter>.<key>`; loading writes into them."""
        return {
            f"{name}.{key}": tensor
            for name, param in self._named.items()
            for key, tensor in self._torch.state[param].items()
        }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _global_norm(shards: list[torch.Tensor], *, copies: int) -> float:
    """Return the norm of the shards of all ranks, which hold `copies` copies of each."""
    square = torch.stack([shard.float().square().sum() for shard in shards])
    square = square.sum(dtype=torch.float64) / copies
    if dist.get_world_size() > 1:
        dist.all_reduce(square)
    return math.sqrt(float(square)) if torch.isfinite(square) else math.inf
