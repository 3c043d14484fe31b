"""Mixtures of experts: records the experts that routers choose, or replaces them by recorded ones.

Families differ in their routers, but every router calls topk over the scores of all experts, inside
a decoder layer. This module intercepts that call. The router still computes the weights of the
chosen experts from its own scores, with gradients.

A server and a trainer round differently, so that their routers sometimes choose different experts
for the same token. Replay removes this difference.

Shape letters: N = tokens of a forward pass, D = decoder layers, K = experts per token.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from arealite.api.engine import LossFn, LossInput
from arealite.base.errors import InvariantError, UserError
from arealite.base.model_folder import Experts, experts_of
from arealite.impl.engine.model import layers_of

T = TypeVar("T")
TOPK = (torch.topk, Tensor.topk)
FILL = (torch.masked_fill, Tensor.masked_fill)
NAME = "_arealite_routing"
"""Attribute of a model."""
BALANCE = "load_balancing_loss_func"
"""Name of the loss function in the modeling module of each family."""
FIX = "Use trainer.ppo.collector.routing=ignore."


class Routing:
    """Intercepts the routers of one model.

    It intercepts within the context of `capture`, and from a `replay` with a record until `stats`.
    Only one thread may use an instance at a time.
    """

    def __init__(self, model: PreTrainedModel, experts: Experts) -> None:
        """Wrap the forward method of each decoder layer, before it is sharded or recomputed."""
        self.experts = experts
        self._replaces = True
        self._has_record = self._is_read = False
        self._chosen: dict[int, Tensor] | None = None
        self._recorded_NDK: Tensor | None = None
        self._counts = torch.zeros(3, dtype=torch.int64)
        """Number of recorded choices with which a router agreed, of all recorded choices, and of
        invalid ones. A choice is the set of experts of one token in one layer."""
        for index, layer in enumerate(layers_of(model)):
            layer.forward = partial(self._run, index, layer.forward)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Routing | None":
        """Return the model's instance, made by the first call; None for a model without experts."""
        if (experts := experts_of(model.config.to_dict())) and NAME not in vars(model):
            setattr(model, NAME, cls(model, experts))
        return vars(model).get(NAME)

    @contextmanager
    def capture(self) -> Iterator[list[np.ndarray]]:
        """Record the experts of the body's forward pass. The yielded list gets them at its end.

        The record is int32 [N, D, K], 0 in layers without experts, as SGLang reports it. The list
        stays empty if no router was found.
        """
        captured: list[np.ndarray] = []
        self._chosen = chosen = dict[int, Tensor]()
        try:
            yield captured
        finally:
            self._chosen = None
        if chosen:
            none = torch.zeros_like(next(iter(chosen.values())))
            layers = [chosen.get(index, none) for index in range(self.experts.layers)]
            captured.append(torch.stack(layers, 1).to("cpu", torch.int32).numpy())

    def replay(self, recorded: Tensor | None, *, replaces: bool = True) -> None:
        """Set the record of the following forward pass and its backward pass.

        Args:
            recorded: uint8 [..., bytes of a token], as in `Segment.routing`, for every token of the
                pass, padding included. Tokens of 255 only are not recorded and route freely.
            replaces: Whether the recorded experts replace those that the routers choose. False:
                they are only compared.

        Raises:
            InvariantError: The record is of another model.
        """
        self._recorded_NDK = None
        self._replaces = replaces
        if recorded is None:
            return
        if recorded.shape[-1] != self.experts.token_bytes:
            what = f"a record has {recorded.shape[-1]} bytes of routing for each token"
            raise InvariantError(f"{what}, model.path needs {self.experts.token_bytes}")
        if self.experts.width == 1:
            recorded = recorded.to(torch.int16).where(recorded != 255, -1)
        else:
            recorded = recorded.view(torch.int16)
        self._has_record = True
        self._recorded_NDK = recorded.reshape(-1, self.experts.layers, self.experts.per_token)

    def stats(self) -> dict[str, float]:
        """End the replay; return the counts of recorded choices since the last call.

        Raises:
            UserError: There is a record, but no router was found.
            InvariantError: A recorded choice has an expert twice, or an expert that does not exist.
        """
        self._recorded_NDK = None
        matched, compared, invalid = self._counts.tolist()
        self._counts = torch.zeros_like(self._counts)
        if self._has_record and not self._is_read:
            what = "Servers report the experts of this model, but its routers call no topk"
            raise UserError(f"{what}, so the report cannot be used. {FIX}")
        if invalid:
            what = f"{invalid} of {compared} recorded choices of experts are invalid"
            raise InvariantError(f"{what}: a server's record is wrong. {FIX}")
        return {"routing_matched": matched, "routing_compared": compared} if compared else {}

    def _run(self, layer: int, forward: Callable[..., T], *args: Any, **options: Any) -> T:
        if self._chosen is None and self._recorded_NDK is None:
            return forward(*args, **options)
        with _Topk(partial(self._choose, layer), self.experts):
            return forward(*args, **options)

    def _choose(self, layer: int, free: Tensor) -> Tensor:
        """Return the experts to use, int64 [N, K] like `free`, the router's own choice."""
        if self._chosen is not None:
            self._chosen[layer] = free
        if self._recorded_NDK is None:
            return free
        recorded = self._recorded_NDK[:, layer].to(torch.int64)
        known = recorded[:, 0] >= 0
        ordered = recorded.sort().values
        valid = (ordered[:, 1:] != ordered[:, :-1]).all(1) & (ordered[:, 0] >= 0)
        valid &= ordered[:, -1] < self.experts.number
        same = (ordered == free.sort().values).all(1)
        self._is_read = True
        counts = torch.stack([(known & same).sum(), known.sum(), (known & ~valid).sum()])
        self._counts = self._counts.to(counts.device) + counts
        return recorded.where((known & valid)[:, None], free) if self._replaces else free


class _Topk(TorchFunctionMode):
    """Replaces the result of topk over the scores of all experts."""

    def __init__(self, choose: Callable[[Tensor], Tensor], experts: Experts) -> None:
        super().__init__()
        self._choose = choose
        self._sizes = (experts.number, experts.per_token)
        self._filled: tuple[Any, Any] = (None, None)
        """(scores with the experts of other groups masked, the same scores without the mask)."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in FILL:
            self._filled = result, args[0]
        if func not in TOPK or args[0].dim() != 2:  # a call with 3 dimensions chooses groups
            return result
        if (args[0].shape[1], result[1].shape[1]) != self._sizes:
            return result
        chosen = self._choose(result[1])
        if chosen is result[1]:
            return result
        filled, scores = self._filled
        scores = scores if args[0] is filled else args[0]
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class Balance:
    """The load-balancing loss of a mixture of experts with output_router_logits in its config.json.

    It is the loss of the model's own code for each row, weighted by the row's share of all tokens
    of the update. It therefore does not depend on micro-batches and ranks.
    """

    def __init__(self, model: PreTrainedModel, config: Any) -> None:
        self._function: Any = vars(sys.modules[type(model).__module__])[BALANCE]
        self._coefficient: float = config.router_aux_loss_coef
        self._sizes: Any = experts_of(config.to_dict())[1:]  # type: ignore[index]
        self._logits: tuple[Tensor, ...] = ()
        model.get_decoder().register_forward_hook(self._keep)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Balance | None":
        """Return the loss; None if the config or the code of the model has none."""
        config = model.config.get_text_config()
        wants = getattr(config, "output_router_logits", False) and config.router_aux_loss_coef
        has_loss = BALANCE in vars(sys.modules[type(model).__module__])
        return cls(model, config) if wants and has_loss else None

    def added_to(self, loss_fn: LossFn, inputs: list[Tensor], tokens: float) -> LossFn:
        """Return `loss_fn` with this loss for a micro-batch, and its stat `router_loss`.

        Args:
            loss_fn: A loss function.
            inputs: `MicroBatch.inputs`.
            tokens: Number of inputs of all rows of the update, on all ranks.
        """

        def with_balance(batch: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
            loss, stats = loss_fn(batch)
            total = loss.new_zeros(())
            for places in inputs:
                logits = tuple(each[places] for each in self._logits)
                total = total + len(places) / tokens * self._function(logits, *self._sizes)
            return loss + self._coefficient * total, stats | {"router_loss": total.detach()}

        return with_balance

    def _keep(self, module: object, args: object, output: Any) -> None:
        self._logits = output.router_logits
