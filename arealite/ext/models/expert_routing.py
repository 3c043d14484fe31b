"""Mixtures of experts: records the experts that routers choose, or replaces them by recorded ones.

Families differ in their routers, but every router calls topk over the scores of all experts, inside
a decoder layer. This module intercepts that call. The router still computes the weights of the
chosen experts from its own scores, with gradients.

A server and a trainer round differently, so that their routers sometimes choose different experts
for the same token. Replay removes this difference.

Shape letters: N = tokens of a forward pass, D = decoder layers, K = experts per token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from arealite.api.engine_extension import EngineExtension, MicroBatch
from arealite.base.errors import InvariantError, UserError
from arealite.base.model_folder import Experts, experts_of
from arealite.impl.engine.model import layers_of

T = TypeVar("T")
TOPK = (torch.topk, Tensor.topk)
FILL = (torch.masked_fill, Tensor.masked_fill)
NAME = "_arealite_routing"
"""Attribute of a model."""
IGNORE_ROUTING = "Use trainer.ppo.collector.routing=ignore."


class Routing:
    """Intercepts the routers of one model.

    It intercepts within the context of `capture`, and from a `replay` with a record until `stats`.
    Only one thread may use an instance at a time.
    """

    def __init__(self, model: PreTrainedModel, experts: Experts) -> None:
        """Wrap the forward method of each decoder layer, before it is sharded or recomputed."""
        self.experts = experts
        self._replaces = True
        self._has_record = False
        self._is_read = False
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
        experts = experts_of(model.config.to_dict())
        if experts and NAME not in vars(model):
            setattr(model, NAME, cls(model, experts))
        return vars(model).get(NAME)

    @contextmanager
    def capture(self) -> Iterator[list[np.ndarray]]:
        """Record the experts of the body's forward pass. The yielded list gets them at its end.

        The record is int32 [N, D, K], 0 in layers without experts, as SGLang reports it. The list
        stays empty if no router was found.
        """
        captured: list[np.ndarray] = []
        chosen_by_layer = dict[int, Tensor]()
        self._chosen = chosen_by_layer
        try:
            yield captured
        finally:
            self._chosen = None
        if not chosen_by_layer:
            return
        any_layer_NK = next(iter(chosen_by_layer.values()))
        no_experts_NK = torch.zeros_like(any_layer_NK)
        layers = range(self.experts.layers)
        chosen = [chosen_by_layer.get(layer, no_experts_NK) for layer in layers]
        chosen_NDK = torch.stack(chosen, 1)
        captured.append(chosen_NDK.to("cpu", torch.int32).numpy())

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
        num_bytes = recorded.shape[-1]
        if num_bytes != self.experts.token_bytes:
            raise InvariantError(
                f"a record has {num_bytes} bytes of routing for each token, "
                f"model.path needs {self.experts.token_bytes}"
            )
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
            raise UserError(
                "Servers report the experts of this model, but its routers call no topk, "
                f"so the report cannot be used. {IGNORE_ROUTING}"
            )
        if invalid:
            raise InvariantError(
                f"{invalid} of {compared} recorded choices of experts are invalid: "
                f"a server's record is wrong. {IGNORE_ROUTING}"
            )
        if not compared:
            return {}
        return {"routing_matched": matched, "routing_compared": compared}

    def _run(
        self,
        layer: int,
        forward: Callable[..., T],
        *args: Any,
        **options: Any,
    ) -> T:
        if self._chosen is None and self._recorded_NDK is None:
            return forward(*args, **options)
        choose = partial(self._choose, layer)
        with _Topk(choose, self.experts):
            return forward(*args, **options)

    def _choose(self, layer: int, free: Tensor) -> Tensor:
        """Return the experts to use, int64 [N, K] like `free`, the router's own choice."""
        if self._chosen is not None:
            self._chosen[layer] = free
        if self._recorded_NDK is None:
            return free
        self._is_read = True
        recorded_NK = self._recorded_NDK[:, layer].to(torch.int64)
        ordered_NK = recorded_NK.sort().values
        has_record_N = recorded_NK[:, 0] >= 0
        is_valid_N = self._are_valid(ordered_NK)
        is_same_N = (ordered_NK == free.sort().values).all(1)
        matched = (has_record_N & is_same_N).sum()
        compared = has_record_N.sum()
        invalid = (has_record_N & ~is_valid_N).sum()
        counts = torch.stack([matched, compared, invalid])
        self._counts = self._counts.to(counts.device) + counts
        if not self._replaces:
            return free
        is_usable_N = has_record_N & is_valid_N
        return recorded_NK.where(is_usable_N[:, None], free)

    def _are_valid(self, ordered_NK: Tensor) -> Tensor:
        """Return whether sorted choices are different experts that exist, bool [N]."""
        are_different_N = (ordered_NK[:, 1:] != ordered_NK[:, :-1]).all(1)
        is_valid_N = are_different_N & (ordered_NK[:, 0] >= 0)
        is_valid_N &= ordered_NK[:, -1] < self.experts.number
        return is_valid_N


class _Topk(TorchFunctionMode):
    """Replaces the result of topk over the scores of all experts."""

    def __init__(self, choose: Callable[[Tensor], Tensor], experts: Experts) -> None:
        super().__init__()
        self._choose = choose
        self._sizes = (experts.number, experts.per_token)
        self._filled: tuple[Any, Any] = (None, None)
        """(scores with the experts of other groups masked, the same scores without the mask)."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in FILL:
            self._filled = output, args[0]
        if func not in TOPK:
            return output
        scores = args[0]
        free = output[1]
        if scores.dim() != 2:  # a call with 3 dimensions chooses groups
            return output
        if (scores.shape[1], free.shape[1]) != self._sizes:
            return output
        chosen = self._choose(free)
        if chosen is free:
            return output
        filled_scores, unfilled_scores = self._filled
        if scores is filled_scores:
            scores = unfilled_scores
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class ExpertReplay(EngineExtension):
    """Replays the experts that servers recorded for the tokens of micro-batches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._routing: Routing
        """Is made by `change_layers`."""

    def change_layers(self) -> None:
        """Modify the routers; see Routing."""
        routing = Routing.of(self._model)
        assert routing is not None, "the model has experts"
        self._routing = routing

    def frozen(self) -> None:
        """Return None: a frozen engine routes freely."""

    def changed_batch(self, batch: MicroBatch) -> MicroBatch:
        """Set the experts of the micro-batch's forward and backward pass."""
        self._routing.replay(batch.routing_BWR, replaces=batch.replays_routing)
        return batch

    def take_stats(self) -> dict[str, float]:
        """End the replay; return the counts of recorded choices on this rank."""
        return self._routing.stats()
