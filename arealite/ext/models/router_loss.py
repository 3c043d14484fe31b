"""The load-balancing loss of a mixture of experts, as the model's own code computes it."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from arealite.api.engine import LossFn, LossInput, Sequence
from arealite.api.engine_extension import EngineExtension, MicroBatch
from arealite.base.model_folder import experts_of

BALANCE = "load_balancing_loss_func"
"""Name of the loss function in the modeling module of each family."""


class RouterLoss(EngineExtension):
    """The load-balancing loss of a mixture of experts with output_router_logits in its config.json.

    It is the loss of the model's own code for each row, weighted by the row's share of all tokens
    of the update. It therefore does not depend on micro-batches and ranks.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, function: Any) -> None:
        config: Any = model.config.get_text_config()
        self._model = model
        self._device = device
        self._function = function
        self._coefficient: float = config.router_aux_loss_coef
        self._sizes: Any = experts_of(config.to_dict())[1:]  # type: ignore[index]
        self._logits: tuple[Tensor, ...] = ()
        self._inputs: list[Tensor] = []
        """`MicroBatch.inputs` of the micro-batch that is computed."""

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> "RouterLoss | None":
        """Return the loss; None if the code of the model has none."""
        function = getattr(sys.modules[type(model).__module__], BALANCE, None)
        return cls(model, device, function) if function else None

    def change_layers(self) -> None:
        """Keep the scores of the routers in each pass."""
        self._model.get_decoder().register_forward_hook(self._keep)

    def changed_batch(self, batch: MicroBatch) -> MicroBatch:
        """Note where the inputs of each row are."""
        self._inputs = batch.inputs
        return batch

    def added_loss(self, loss_fn: LossFn, rows: list[Sequence]) -> LossFn:
        """Return `loss_fn` with this loss, and its stat `router_loss`."""
        num_inputs = self._sum_inputs(rows)

        def with_balance(batch: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
            loss, stats = loss_fn(batch)
            router_loss = loss.new_zeros(())
            for row_places in self._inputs:
                row_share = len(row_places) / num_inputs
                row_logits = tuple(layer_logits[row_places] for layer_logits in self._logits)
                row_loss = self._function(row_logits, *self._sizes)
                router_loss = router_loss + row_share * row_loss
            balanced_loss = loss + self._coefficient * router_loss
            return balanced_loss, stats | {"router_loss": router_loss.detach()}

        return with_balance

    def _sum_inputs(self, rows: list[Sequence]) -> int:
        """Return the number of inputs of the update's rows on all ranks."""
        num_inputs = sum(max(1, len(row.tokens) - 1) for row in rows)
        total = torch.tensor(num_inputs, device=self._device)
        dist.all_reduce(total)
        return int(total)

    def _keep(
        self,
        module: object,
        args: object,
        output: Any,
    ) -> None:
        self._logits = output.router_logits
