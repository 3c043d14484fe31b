"""Runs models whose cache is not only keys and values of full and sliding attention.

Examples are linear attention, state space layers and chunked attention. Each batch has a cache that
the model itself makes. The requests of a batch have equal lengths, so no model needs padding.

Shape letters: B = rows of a batch, L = prompt length, V = vocabulary.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel as Model
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from arealite.base import log
from arealite.base.errors import UserError, one_line
from arealite.base.model_folder import experts_of
from arealite.impl.server.decoder import BaseDecoder, Decoder
from arealite.impl.server.generation import Generation, SamplingParams
from arealite.impl.weights.casting import computing_in
from arealite.impl.weights.sums import check_finite

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


@dataclass
class Batch:
    """Requests of equal length, and their cache."""

    rows: list[Generation]
    cache: Any


class CacheDecoder(BaseDecoder):
    """Runs any model with a cache, with one forward pass for each batch of equal lengths."""

    def __init__(self, model: Model, *, max_rows: int, seed: int) -> None:
        super().__init__(model, max_rows=max_rows, seed=seed)
        self._batches: list[Batch] = []

    def prefill(self, waiting: deque[Generation]) -> None:
        prompts, generations, sources = self._admit(waiting)
        self.running += generations
        with self._recorder(generations, sources, [*map(len, prompts)]):
            logits_BV, cache = self._forward(torch.tensor(prompts), 0, None)
        if len(sources) > len(prompts):
            cache = self._select(cache, torch.tensor(sources))
        self._batches.append(Batch(generations, cache))
        self._sample(generations, logits_BV[sources], self._settings_of(generations))

    def decode(self) -> None:
        for batch in self._batches:
            rows = batch.rows
            tokens_B1 = torch.tensor([[each.output[-1]] for each in rows])
            start = len(rows[0].prompt) + len(rows[0].output) - 1
            with self._recorder(rows):
                logits_BV, batch.cache = self._forward(tokens_B1, start, batch.cache)
            self._sample(rows, logits_BV, self._settings_of(rows))

    def remove_ended(self) -> list[Generation]:
        """Free and return the ended requests."""
        if not (ended := [each for each in self.running if each.ended]):
            return []
        self.running = [each for each in self.running if not each.ended]
        for batch in self._batches:
            left = [row for row, each in enumerate(batch.rows) if not each.ended]
            if 0 < len(left) < len(batch.rows):
                batch.cache = self._select(batch.cache, torch.tensor(left))
            batch.rows = [batch.rows[row] for row in left]
        self._batches = [batch for batch in self._batches if batch.rows]
        return ended

    def clear(self) -> list[Generation]:
        self._batches = []
        return super().clear()

    def _forward(self, tokens_BL: Tensor, start: int, cache: Any) -> tuple[Tensor, Any]:
        """Return the last logits [B, V] of tokens from position `start`, and the cache."""
        end = start + tokens_BL.shape[1]
        ids_BL = tokens_BL.to(self._device)
        positions_BL = torch.arange(start, end, device=self._device).expand_as(ids_BL)
        inputs = {self._name: cache, "position_ids": positions_BL, "logits_to_keep": 1}
        inputs = {name: inputs[name] for name in inputs if name in self._known}
        out = self.model(input_ids=ids_BL, use_cache=True, **inputs)
        return out.logits[:, -1], out[self._name]

    def _select(self, cache: Any, index: Tensor) -> Any:
        """Return a cache of the rows `index`, which may repeat a row."""
        cache.reorder_cache(index)
        if states := getattr(cache, "linear_cache", None):  # MiniMax keeps these elsewhere
            cache.linear_cache = [each[index] if len(each) else each for each in states]
        return cache


class PlainDecoder(CacheDecoder):
    """Runs any causal model without a cache: each token costs a forward pass over its whole row."""

    def _forward(self, tokens_BL: Tensor, start: int, cache: Any) -> tuple[Tensor, Any]:
        whole = tokens_BL if cache is None else torch.cat([cache, tokens_BL], 1)
        logits = self.model(input_ids=whole.to(self._device), use_cache=False).logits
        return logits[:, -1], whole

    def _select(self, cache: Any, index: Tensor) -> Any:
        return cache[index]


def make_decoder(model: Model, *, max_rows: int, seed: int) -> BaseDecoder:
    """Return the fastest decoder whose log-probabilities equal those of plain forward passes.

    Each decoder is tried on a few short rows.

    Raises:
        UserError: No decoder runs the model with equal log-probabilities.
    """
    if model.config._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        # Only models with full and sliding attention can be packed.
        return Decoder(model, max_rows=max_rows, seed=seed)
    kinds = [Decoder, CacheDecoder, PlainDecoder]
    reason = "the fastest"
    limits = (getattr(module, "time_step_limit", (0,)) for module in model.modules())
    if any(limit[0] > 0 for limit in limits):  # ignored by transformers in passes of one token
        kinds = [PlainDecoder]
        reason = "time_step_limit"
    for kind in kinds:
        try:
            off, bound = _difference(kind, model)
        except Exception as error:  # noqa: BLE001  (each model fails in its own way)
            reason = f"{type(error).__name__}: {one_line(error)}"
            continue
        if off <= bound:
            logger.info("decoder", type=kind.__name__, off=off, bound=bound, why=reason)
            return kind(model, max_rows=max_rows, seed=seed)
        if off != off:
            check_finite(model, str(model.name_or_path))
        differ = f"log-probabilities differ by {off:.2g} from those of plain forward passes"
        reason = f"{differ} ({bound:.2g} is allowed in {str(model.dtype).removeprefix('torch.')})"
    what = f"The embedded server cannot run {type(model).__name__}: {reason:.200}"
    raise UserError(f"{what.rstrip('.')}. Use llm_server.type=sglang, or another model.")


@torch.inference_mode()
def _difference(kind: type[BaseDecoder], model: Model) -> tuple[float, float]:
    """Return how far a decoder's log-probabilities are from those of plain passes, and the bound.

    Both are in nats. In float32, the difference is the maximum. In 16 bits, it is the usual
    distance from plain passes in float32.
    """
    size = min(64, model.config.get_text_config().vocab_size)
    tokens = torch.randint(size, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    wanted = (tokens[:3], 8), (tokens[:3], 6), (tokens, 8)
    rows = [Generation("", ids, SamplingParams(), most, frozenset()) for ids, most in wanted]
    waiting = deque(rows)
    with _short_windows(model):
        decoder = kind(model, max_rows=3, seed=0)
        while waiting or decoder.running:
            if waiting:
                decoder.prefill(waiting)
            decoder.decode()
            decoder.remove_ended()
        decoded = torch.tensor([logprob for row in rows for logprob in row.logprobs])
        plain = _plain_logprobs(model, rows)
        if model.dtype == torch.float32:
            return float((decoded - plain).abs().max()), BOUND
        with computing_in(model, torch.float32):
            exact = _plain_logprobs(model, rows)
    is_mixture = experts_of(model.config.to_dict()) is not None
    usual = torch.median if is_mixture else torch.mean
    noise = float(usual((plain - exact).abs()))
    # NaN stays NaN: the caller looks for its cause.
    return float(usual((decoded - exact).abs())), max(BOUND, MARGIN * noise)


def _plain_logprobs(model: Model, rows: list[Generation]) -> Tensor:
    """Return the log-probabilities of the output of all rows from plain forward passes [N]."""
    logprobs = list[Tensor]()
    for row in rows:
        ids = torch.tensor([row.prompt + row.output], device=model.device)
        passed = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        logprobs.append(passed.gather(1, ids[0, 1:, None])[-len(row.output) :, 0].cpu())
    return torch.cat(logprobs)


@contextmanager
def _short_windows(model: Model) -> Iterator[None]:
    """Let the windows of attention be shorter than the probe's rows."""
    config = model.config.get_text_config()
    saved = {name: value for name in WINDOWS if (value := getattr(config, name, None))}
    try:
        for name in saved:
            setattr(config, name, PROBE_WINDOW)
        yield
    finally:
        for name, value in saved.items():
            setattr(config, name, value)
