"""Runs models whose cache is not only keys and values of full and sliding attention.

Examples are linear attention, state space layers and chunked attention. Each batch has a cache that
the model itself makes. The requests of a batch have equal lengths, so no model needs padding.

Shape letters: B = rows of a batch, L = tokens of a row, V = vocabulary, N = sampled tokens of all
rows.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel as Model
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from arealite.base import log
from arealite.base.errors import UserError, one_line
from arealite.base.model_folder import experts_of
from arealite.ext.embedded.decoder import Admitted, BaseDecoder, Decoder
from arealite.ext.embedded.generation import Generation, SamplingParams
from arealite.ext.weights.casting import computing_in
from arealite.ext.weights.checksums import check_finite

logger = log.get(__name__)

WINDOWS = "sliding_window", "attention_chunk_size"
"""Config fields that limit how far attention reaches, in tokens."""
PROBE_WINDOW = 4
BOUND = 1e-3
"""Largest difference of a log-probability in float32, in nats. In 16 bits, no bound is lower."""
MARGIN = 3.0
"""Bound of the usual difference in 16 bits, in multiples of the noise: of the usual difference
between plain forward passes in this dtype and in float32. It was at most 1.7 times the noise in the
right decoders of 23 families, and at least 3.5 times with positions of SmolLM2 one too large. Usual
is the mean, or the median for a mixture of experts: near ties, rounding decides which experts
compute a token."""


@dataclass(kw_only=True)
class DecodingBatch:
    """Requests of equal length, and their cache."""

    rows: list[Generation]
    cache: Any


class CacheDecoder(BaseDecoder):
    """Runs any model with a cache, with one forward pass for each batch of equal lengths."""

    def __init__(self, model: Model, **options: Any) -> None:
        super().__init__(model, **options)
        self._batches: list[DecodingBatch] = []

    def _run_prompts(self, admitted: Admitted) -> Tensor:
        prompts = admitted.prompts
        generations = admitted.generations
        sources = admitted.sources
        lengths = [len(prompt) for prompt in prompts]
        self.adapters.select(admitted.adapters)
        with self._recorder(generations, sources, lengths):
            logits_BV, cache = self._forward(torch.tensor(prompts), 0, None)
        has_equal_prompts = len(sources) > len(prompts)
        if has_equal_prompts:
            cache = self._select(cache, torch.tensor(sources))
        self._batches.append(DecodingBatch(rows=generations, cache=cache))
        return logits_BV[sources]

    def decode(self) -> None:
        for batch in self._batches:
            rows = batch.rows
            last_tokens = [[generation.output[-1]] for generation in rows]
            tokens_B1 = torch.tensor(last_tokens)
            start = rows[0].length_so_far() - 1
            self.adapters.select([generation.adapter for generation in rows])
            with self._recorder(rows):
                logits_BV, batch.cache = self._forward(tokens_B1, start, batch.cache)
            self._sample(rows, logits_BV, self._settings_of(rows))

    def remove(self, chosen: Callable[[Generation], bool]) -> list[Generation]:
        """Free and return the chosen requests; all others keep their keys and values."""
        removed = [generation for generation in self.running if chosen(generation)]
        if not removed:
            return []
        self.running = [generation for generation in self.running if not chosen(generation)]
        for batch in self._batches:
            rows_left = [row for row, generation in enumerate(batch.rows) if not chosen(generation)]
            if 0 < len(rows_left) < len(batch.rows):
                batch.cache = self._select(batch.cache, torch.tensor(rows_left))
            batch.rows = [batch.rows[row] for row in rows_left]
        self._batches = [batch for batch in self._batches if batch.rows]
        return removed

    def clear(self) -> list[Generation]:
        self._batches = []
        return super().clear()

    def _forward(
        self,
        tokens_BL: Tensor,
        start: int,
        cache: Any,
    ) -> tuple[Tensor, Any]:
        """Return the last logits [B, V] of tokens from position `start`, and the cache."""
        end = start + tokens_BL.shape[1]
        ids_BL = tokens_BL.to(self._device)
        positions_L = torch.arange(start, end, device=self._device)
        all_inputs = {
            self._cache_name: cache,
            "position_ids": positions_L.expand_as(ids_BL),
            "logits_to_keep": 1,
        }
        inputs = {name: all_inputs[name] for name in all_inputs if name in self._model_inputs}
        output = self.model(input_ids=ids_BL, use_cache=True, **inputs)
        return output.logits[:, -1], output[self._cache_name]

    def _select(self, cache: Any, index: Tensor) -> Any:
        """Return a cache of the rows `index`, which may repeat a row."""
        cache.reorder_cache(index)
        linear_states = getattr(cache, "linear_cache", None)  # MiniMax keeps these elsewhere
        if linear_states:
            cache.linear_cache = [state[index] if len(state) else state for state in linear_states]
        return cache


class PlainDecoder(CacheDecoder):
    """Runs any causal model without a cache: each token costs a forward pass over its whole row."""

    def _forward(
        self,
        tokens_BL: Tensor,
        start: int,
        cache: Any,
    ) -> tuple[Tensor, Any]:
        rows_BL = tokens_BL
        if cache is not None:
            rows_BL = torch.cat([cache, tokens_BL], 1)
        output = self.model(input_ids=rows_BL.to(self._device), use_cache=False)
        return output.logits[:, -1], rows_BL

    def _select(self, cache: Any, index: Tensor) -> Any:
        return cache[index]


def make_decoder(model: Model, **options: Any) -> BaseDecoder:
    """Return the fastest decoder whose log-probabilities equal those of plain forward passes.

    Each decoder is tried on a few short rows.

    Args:
        model: The model.
        options: See BaseDecoder.

    Raises:
        UserError: No decoder runs the model with equal log-probabilities.
    """
    if model.config._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        # Only models with full and sliding attention can be packed.
        return Decoder(model, **options)
    decoder_types = [Decoder, CacheDecoder, PlainDecoder]
    reason = "the fastest"
    if _has_time_step_limit(model):
        decoder_types = [PlainDecoder]
        reason = "time_step_limit"
    for decoder_type in decoder_types:
        try:
            difference, bound = _difference(decoder_type, model)
        except Exception as error:  # noqa: BLE001  (each model fails in its own way)
            reason = f"{type(error).__name__}: {one_line(error)}"
            continue
        if difference <= bound:
            logger.info(
                "decoder",
                type=decoder_type.__name__,
                off=difference,
                bound=bound,
                why=reason,
            )
            return decoder_type(model, **options)
        if math.isnan(difference):
            check_finite(model, str(model.name_or_path))
        dtype = str(model.dtype).removeprefix("torch.")
        reason = (
            f"log-probabilities differ by {difference:.2g} from those of plain forward passes "
            f"({bound:.2g} is allowed in {dtype})"
        )
    model_type = type(model).__name__
    problem = f"The embedded server cannot run {model_type}: {reason:.200}".rstrip(".")
    raise UserError(f"{problem}. Use llm_server.type=sglang, or another model.")


def _has_time_step_limit(model: Model) -> bool:
    """Return whether a layer limits time steps: transformers ignores that in one-token passes."""
    return any(getattr(module, "time_step_limit", (0,))[0] > 0 for module in model.modules())


@torch.inference_mode()
def _difference(
    decoder_type: type[BaseDecoder],
    model: Model,
) -> tuple[float, float]:
    """Return how far a decoder's log-probabilities are from those of plain passes, and the bound.

    Both are in nats. In float32, the difference is the maximum. In 16 bits, it is the usual
    distance from plain passes in float32.
    """
    generations = _probe_generations(model)
    with _short_windows(model):
        decoded_N = _decoded_logprobs(decoder_type, model, generations)
        plain_N = _plain_logprobs(model, generations)
        if model.dtype == torch.float32:
            return float((decoded_N - plain_N).abs().max()), BOUND
        with computing_in(model, torch.float32):
            exact_N = _plain_logprobs(model, generations)
    is_mixture = experts_of(model.config.to_dict()) is not None
    usual = torch.median if is_mixture else torch.mean
    noise = float(usual((plain_N - exact_N).abs()))
    difference = float(usual((decoded_N - exact_N).abs()))
    # NaN stays NaN: the caller looks for its cause.
    return difference, max(BOUND, MARGIN * noise)


def _probe_generations(model: Model) -> list[Generation]:
    """Return short requests with random tokens; two of them have equal prompts."""
    num_tokens = min(64, model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(num_tokens, (9,), generator=generator).tolist()
    prompts_and_limits = [
        (tokens[:3], 8),
        (tokens[:3], 6),
        (tokens, 8),
    ]
    return [
        Generation(
            rid="",
            prompt=prompt,
            sampling=SamplingParams(),
            limit=limit,
            stops=frozenset(),
        )
        for prompt, limit in prompts_and_limits
    ]


def _decoded_logprobs(
    decoder_type: type[BaseDecoder],
    model: Model,
    generations: list[Generation],
) -> Tensor:
    """Run the requests with a decoder; return the log-probabilities of their output [N]."""
    decoder_type(model, max_rows=3, seed=0).run(generations)
    return torch.tensor([*chain.from_iterable(row.logprobs for row in generations)])


def _plain_logprobs(model: Model, generations: list[Generation]) -> Tensor:
    """Return the log-probabilities of the output of all requests from plain forward passes [N]."""
    logprobs = list[Tensor]()
    for generation in generations:
        ids_1L = torch.tensor([generation.prompt + generation.output], device=model.device)
        output = model(input_ids=ids_1L, use_cache=False)
        logprobs_LV = output.logits[0, :-1].float().log_softmax(-1)
        next_ids_L1 = ids_1L[0, 1:, None]
        logprobs_L1 = logprobs_LV.gather(1, next_ids_L1)
        num_sampled = len(generation.output)
        logprobs.append(logprobs_L1[-num_sampled:, 0].cpu())
    return torch.cat(logprobs)


@contextmanager
def _short_windows(model: Model) -> Iterator[None]:
    """Let the windows of attention be shorter than the probe's rows."""
    config = model.config.get_text_config()
    saved_windows = {name: getattr(config, name) for name in WINDOWS if getattr(config, name, None)}
    try:
        for name in saved_windows:
            setattr(config, name, PROBE_WINDOW)
        yield
    finally:
        for name, window in saved_windows.items():
            setattr(config, name, window)
