"""Records the experts that a mixture of experts uses for each token of a request.

Shape letters: B = rows of a pass, L = tokens of a row, D = decoder layers, K = experts per
token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel

from arealite.ext.embedded.generation import Generation
from arealite.ext.models.expert_routing import Routing


def any_wants_routing(generations: Sequence[Generation]) -> bool:
    """Return whether a request of the batch asks for its experts."""
    return any(generation.wants_routing for generation in generations)


class RoutingRecorder:
    """Records the forward passes of one model; no-op for other models and without a request."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._routing = Routing.of(model)
        if getattr(model.config, "output_router_logits", False):  # a loss that no server needs
            no_logits = {"output_router_logits": False}
            model.register_forward_pre_hook(
                lambda _, args, options: (args, options | no_logits),
                with_kwargs=True,
            )

    @contextmanager
    def __call__(
        self,
        generations: Sequence[Generation],
        sources: Sequence[int] | None = None,
        lengths: Sequence[int] = (),
    ) -> Iterator[None]:
        """Record the body's forward pass.

        Args:
            generations: The requests of the pass.
            sources: For prompts, the row of each request; its experts replace the request's record.
                None if each request has a row; the experts of the last token extend the record.
            lengths: For prompts, the tokens of each row without padding; () if rows have one token.
        """
        if self._routing is None or not any_wants_routing(generations):
            yield
            return
        with self._routing.capture() as captured:
            yield
        if not captured:
            return
        rows = sources or range(len(generations))
        num_rows = len(lengths) or len(generations)
        layers_and_experts = captured[0].shape[1:]
        experts_BLDK = captured[0].reshape(num_rows, -1, *layers_and_experts)
        for generation, row in zip(generations, rows, strict=True):
            if not generation.wants_routing:
                continue
            if lengths:
                generation.routing.clear()
                generation.routing.append(experts_BLDK[row, : lengths[row]])
            else:
                generation.routing.append(experts_BLDK[row, -1:])
