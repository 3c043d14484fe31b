"""The forward passes: prompts of new requests, then one token for every running request.

transformers' continuous batching is not used, because on a CPU it builds a mask over all pairs of
requests. Here every request has its own row in the cache.

Shape letters: B = rows of a batch, L = padded prompt length, T = positions read, V = vocabulary,
P = positions with logits.
"""

import inspect
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from arealite.ext.agents.turn_tokens import common_prefix_length
from arealite.ext.embedded.expert_records import RoutingRecorder, any_wants_routing
from arealite.ext.embedded.generation import Generation
from arealite.ext.embedded.served_adapters import ServedAdapters
from arealite.ext.embedded.slot_cache import SlotCache, round_up
from arealite.ext.embedded.token_sampler import Settings, ban_stops, draw, settings_of

PREFILL_TOKENS = 8192
"""Padded prompt tokens of one forward pass; a longer prompt gets its own pass."""
PREFILL_LOGITS = 2**25
"""Logits of one such pass: 128 MB in float32."""
MIN_PREFIX_TOKENS = 16
"""Smallest number of tokens of a shared prefix."""
WIDTH_BLOCK = 16
"""Attention reads a multiple of this many positions."""
CACHES = "cache", "past_key_values", "cache_params"
"""Names of a model's cache, as an argument and in the output; from transformers 5.24: `cache`."""
Ids = tuple[int, ...]
"""A prompt."""
Mask = Tensor | dict[str, Tensor]


def window_of(model: PreTrainedModel) -> int | None:
    """Return the size of the attention window in sliding layers, in tokens, the query included.

    None: no layer slides. Without `layer_types`, all layers slide if the model's code supports it.
    """
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        has_sliding_layers = "sliding_attention" in layer_types
    else:
        model_code = sys.modules[type(model).__module__]
        has_sliding_layers = hasattr(model_code, "create_sliding_window_causal_mask")
    return getattr(config, "sliding_window", None) if has_sliding_layers else None


def _on_cpu(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.cpu().numpy() for tensor in tensors]


@dataclass(kw_only=True)
class Admitted:
    """New requests of one forward pass. Equal prompts with equal adapters are one row."""

    generations: list[Generation]
    prompts: list[Ids]
    """The tokens of each row."""
    adapters: list[str]
    """The name of each row's adapter."""
    sources: list[int]
    """The row of each request."""


class BaseDecoder(ABC):
    """Admits requests and samples their tokens; a subclass runs the model."""

    mixes_lengths = False
    """Whether prompts of different lengths can be admitted together."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int,
        seed: int,
        batch_invariant: bool = False,
    ) -> None:
        """Admit no request yet.

        Args:
            model: The model.
            max_rows: The largest number of running requests.
            seed: Of requests without one.
            batch_invariant: Compute each prompt as if it were alone: attention over padded prompts
                adds numbers in another order.
        """
        self.model = model
        self.max_rows = max_rows
        self._batch_invariant = batch_invariant
        self.running: list[Generation] = []
        self._device = str(next(model.parameters()).device)
        self.adapters = ServedAdapters(model)
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._recorder = RoutingRecorder(model)
        self._model_inputs = inspect.signature(model.forward).parameters
        """Names of the arguments that the model takes."""
        cache_names = [name for name in CACHES if name in self._model_inputs]
        self._cache_name = cache_names[0] if cache_names else CACHES[0]
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def prefill(self, waiting: deque[Generation]) -> None:
        """Admit waiting requests that fit, and sample their first tokens.

        Equal prompts are computed once.
        """
        num_tokens = self._prefill_pass(waiting)
        while self._batch_invariant and waiting and len(self.running) < self.max_rows:
            if num_tokens >= PREFILL_TOKENS:
                break
            num_tokens += self._prefill_pass(waiting)

    def _prefill_pass(self, waiting: deque[Generation]) -> int:
        """Admit the requests of one forward pass; return the number of their prompts' tokens."""
        admitted = self._admit(waiting)
        generations = admitted.generations
        self.running += generations
        self._score_prompts(generations)
        logits_BV = self._run_prompts(admitted)
        self._sample(generations, logits_BV, self._settings_of(generations))
        return sum(map(len, admitted.prompts))

    @torch.inference_mode()
    def run(self, generations: Sequence[Generation]) -> None:
        """Run requests to their ends, while there are no others."""
        waiting = deque(generations)
        while waiting or self.running:
            if waiting and len(self.running) < self.max_rows:
                self.prefill(waiting)
                self.remove_ended()
            if self.running:
                self.decode()
                self.remove_ended()

    @abstractmethod
    def _run_prompts(self, admitted: Admitted) -> Tensor:
        """Compute prompts; return the last logits [B, V] of each request.

        The requests are the last ones in `running`.
        """

    @abstractmethod
    def decode(self) -> None:
        """Sample one token of every running request."""

    @abstractmethod
    def remove(self, chosen: Callable[[Generation], bool]) -> list[Generation]:
        """Free and return the chosen requests; all others keep their keys and values."""

    def remove_ended(self) -> list[Generation]:
        """Free and return the ended requests."""
        return self.remove(lambda generation: generation.ended)

    def clear(self) -> list[Generation]:
        """Remove and return all running requests; drop all keys, values and states."""
        removed = self.running
        self.running = []
        return removed

    def drop_prefix(self) -> None:  # noqa: B027  (other decoders store none)
        """Drop the prefix that is stored for later requests, because the weights have changed.

        Running requests keep their keys and values.
        """

    def _admit(self, waiting: deque[Generation]) -> Admitted:
        """Remove the requests that fit from `waiting`."""
        row_of_prompt: dict[tuple[str, Ids], int] = {}
        admitted: list[Generation] = []
        sources: list[int] = []
        lengths: set[int] = set()
        while waiting and len(self.running) + len(admitted) < self.max_rows:
            generation = waiting[0]
            prompt = (*generation.prompt, *generation.output)
            key = (generation.adapter, prompt)
            if key in row_of_prompt:
                generation.cached_tokens = len(prompt) - 1
            else:
                has_other_length = bool(lengths) and len(prompt) not in lengths
                if has_other_length and not self.mixes_lengths:
                    break
                lengths.add(len(prompt))
                if row_of_prompt and not self._fit_one_pass(len(row_of_prompt) + 1, lengths):
                    break
            admitted.append(waiting.popleft())
            sources.append(row_of_prompt.setdefault(key, len(row_of_prompt)))
        return Admitted(
            generations=admitted,
            prompts=[prompt for _, prompt in row_of_prompt],
            adapters=[adapter for adapter, _ in row_of_prompt],
            sources=sources,
        )

    def _fit_one_pass(self, num_prompts: int, lengths: Collection[int]) -> bool:
        """Return whether one forward pass may compute prompts of these distinct lengths.

        It computes logits of every prompt at the last position of each length.
        """
        num_tokens = num_prompts * max(lengths)
        num_logits = num_prompts * len(lengths) * self._vocab_size
        fits = num_tokens <= PREFILL_TOKENS and num_logits <= PREFILL_LOGITS
        return fits and not self._batch_invariant

    def _settings_of(self, generations: Sequence[Generation]) -> Settings:
        return settings_of(generations, vocab_size=self._vocab_size, device=self._device)

    def _sample(
        self,
        generations: list[Generation],
        logits_BV: Tensor,
        settings: Settings,
    ) -> Tensor:
        """Draw a token for each generation and append it; return the tokens [B]."""
        ban_stops(logits_BV, generations)
        tokens_B, logprobs_B, top = draw(logits_BV, settings, self._generator)
        drawn = zip(generations, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
        for generation, token, logprob in drawn:
            generation.append(token, logprob)
        if top is not None:
            ids_BM, logprobs_BM = _on_cpu(*top)
            for row, generation in enumerate(generations):
                generation.append_top(ids_BM[row], logprobs_BM[row])
        return tokens_B

    def _score_prompts(self, generations: Sequence[Generation]) -> None:
        """Score the prompts of the requests that ask for it, without cache."""
        batch = list[Generation]()
        longest = 0
        for generation in generations:
            if generation.scored_from is None:
                continue
            longest = max(longest, len(generation.prompt))
            num_tokens = (len(batch) + 1) * longest
            fits = num_tokens <= PREFILL_TOKENS and num_tokens * self._vocab_size <= PREFILL_LOGITS
            if batch and (self._batch_invariant or not fits):
                self._score(batch)
                batch = []
                longest = len(generation.prompt)
            batch.append(generation)
        if batch:
            self._score(batch)

    def _score(self, generations: Sequence[Generation]) -> None:
        """Score the prompts of requests in one forward pass, padded on the right."""
        prompts = [torch.tensor(generation.prompt) for generation in generations]
        ids_BL = pad_sequence(prompts, batch_first=True).to(self._device)
        self.adapters.select([generation.adapter for generation in generations])
        logits_BLV = self._prompt_logits(ids_BL)
        for row, generation in enumerate(generations):
            begin = generation.scored_from or 0
            length = len(generation.prompt)
            logprobs_LV = logits_BLV[row, begin : length - 1].float().log_softmax(-1)
            scored_ids_L = ids_BL[row, begin + 1 : length]
            logprobs_L1 = logprobs_LV.gather(1, scored_ids_L[:, None])
            generation.prompt_logprobs = logprobs_L1[:, 0].tolist()
            generation.target_logprobs = logprobs_LV[:, generation.target_ids].tolist()
            if generation.num_top:
                top_logprobs_LM, top_ids_LM = logprobs_LV.topk(generation.num_top)
                rows = _on_cpu(top_ids_LM, top_logprobs_LM)
                generation.prompt_top_tokens = [*zip(*rows, strict=True)]

    def _prompt_logits(self, ids_BL: Tensor) -> Tensor:
        """Return the logits [B, L, V] of prompts, without cache."""
        return self.model(input_ids=ids_BL, use_cache=False).logits


class Decoder(BaseDecoder):
    """Runs a model of full and sliding attention: row r of its cache belongs to running[r]."""

    mixes_lengths = True

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(model, **options)
        self._window = window_of(model)
        self._cache = SlotCache(model.config.get_text_config().num_hidden_layers)
        self._settings: Settings | None = None
        """None: the batch's tensors must be rebuilt."""
        self._longest = 0
        self._prefix: Ids = ()
        """The tokens whose keys and values the cache keeps for later prompts."""
        self._latest: Ids = ()
        """The last prompt that did not begin with `_prefix`, under the present weights."""
        self._prefix_adapter = ""
        """The adapter that `_prefix` and `_latest` belong to."""

    def _run_prompts(self, admitted: Admitted) -> Tensor:
        prompts = admitted.prompts
        generations = admitted.generations
        sources = admitted.sources
        first = len(self.running) - len(generations)
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        self._settings = None
        self._cache.reserve(len(self.running), longest + 1)
        prefix_length = 0
        if not (any_wants_routing(generations) or self._batch_invariant):
            prefix_length = self._reuse_prefix(admitted, first)
        self.adapters.select(admitted.adapters)
        last_positions = sorted({length - 1 for length in lengths})
        with self._recorder(generations, sources, lengths):
            logits_BPV = self._forward_prompts(
                prompts,
                last_positions,
                first=first,
                begin=prefix_length,
            )
        moves = [
            (first + source, first + row) for row, source in enumerate(sources) if source != row
        ]
        self._cache.copy_rows(moves, longest)
        index_of_position = {position: i for i, position in enumerate(last_positions)}
        last_indices = [index_of_position[lengths[source] - 1] for source in sources]
        return logits_BPV[sources, last_indices]

    def _reuse_prefix(
        self,
        admitted: Admitted,
        first: int,
    ) -> int:
        """Write keys and values of a prefix that all prompts share, for example a system prompt.

        Prompts of different adapters share none. Compute the prefix unless the stored one matches;
        only the latest one is stored. The last token of each prompt is not part of it, because its
        logits are needed.

        Returns:
            The number of tokens of the prefix; 0: the prompts share too few.
        """
        prompts = admitted.prompts
        adapter = admitted.adapters[0]
        if len(set(admitted.adapters)) > 1:
            return 0
        if adapter != self._prefix_adapter:
            self.drop_prefix()
            self._prefix_adapter = adapter
        max_length = min(map(len, prompts)) - 1
        stored = self._prefix[:max_length]
        stored_length = len(stored)
        is_usable = stored_length >= MIN_PREFIX_TOKENS and all(
            prompt[:stored_length] == stored for prompt in prompts
        )
        if is_usable:
            for generation in admitted.generations:
                generation.cached_tokens = max(generation.cached_tokens, stored_length)
        else:
            compared = prompts if len(prompts) > 1 else [*prompts, self._latest]
            # All other prompts are between the lowest and the highest one.
            common_length = common_prefix_length(min(compared), max(compared))
            length = min(max_length, common_length)
            self._latest = prompts[-1]
            if length < MIN_PREFIX_TOKENS:
                return 0
            self._prefix = prompts[0][:length]
            self.adapters.select([adapter])
            self._forward_prompts([self._prefix], [length - 1], first=first)
            self._cache.store_prefix(first, length)
        rows = slice(first, first + len(prompts))
        self._cache.load_prefix(rows)
        return min(max_length, len(self._prefix))

    def _forward_prompts(
        self,
        prompts: Sequence[Ids],
        positions: Sequence[int],
        *,
        first: int,
        begin: int = 0,
    ) -> Tensor:
        """Compute the tokens of prompts from position `begin` on, in rows from `first` on.

        Returns:
            Logits [B, P, V] at `positions`. The prompts are padded on the right.
        """
        longest = max(map(len, prompts))
        rows = slice(first, first + len(prompts))
        width = longest if begin else None
        self._cache.start((rows, slice(begin, longest)), width=width)
        suffixes = [torch.tensor(prompt[begin:]) for prompt in prompts]
        tokens_BL = pad_sequence(suffixes, batch_first=True)
        positions_L = torch.arange(begin, longest, device=self._device)
        output = self.model(
            input_ids=tokens_BL.to(self._device),
            attention_mask=self._mask(positions_L[None], longest),
            position_ids=positions_L.expand(len(prompts), -1),
            **{self._cache_name: self._cache},
            use_cache=True,
            logits_to_keep=torch.tensor(positions, device=self._device) - begin,
        )
        return output.logits

    def _prompt_logits(self, ids_BL: Tensor) -> Tensor:
        # A trainer's model that packs rows needs the mask.
        length = ids_BL.shape[1]
        positions_L = torch.arange(length, device=self._device)
        mask = self._mask(positions_L[None], length)
        return self.model(input_ids=ids_BL, attention_mask=mask, use_cache=False).logits

    def decode(self) -> None:
        settings = self._settings or self._rebuild()
        width = round_up(self._longest + 1, WIDTH_BLOCK)
        positions_B1 = self._lengths_B[:, None]
        self._cache.reserve(len(self.running), width)
        self._cache.start((self._rows_B1, positions_B1), width=width)
        with self._recorder(self.running):
            output = self.model(
                input_ids=self._tokens_B[:, None],
                attention_mask=self._mask(positions_B1, width),
                position_ids=positions_B1,
                **{self._cache_name: self._cache},
                use_cache=True,
            )
        self._lengths_B = self._lengths_B + 1
        self._longest += 1
        logits_BV = output.logits[:, -1]
        self._tokens_B = self._sample(self.running, logits_BV, settings)

    def _mask(self, positions_BL: Tensor, width: int) -> Mask:
        """Return the attention mask [B, 1, L, width] for queries at `positions_BL`, `width` keys;
        a dict with a mask for each kind of layer if the model has `layer_types`."""

        def mask(is_hidden: Tensor) -> Tensor:
            zeros = torch.zeros_like(is_hidden, dtype=self.model.dtype)
            return zeros.masked_fill_(is_hidden, -torch.inf)

        keys_T = torch.arange(width, device=self._device)
        queries_B1L1 = positions_BL[:, None, :, None]
        is_later = keys_T > queries_B1L1
        if self._window is None:
            return mask(is_later)
        is_before_window = keys_T <= queries_B1L1 - self._window
        sliding_mask = mask(is_later | is_before_window)
        layer_types = getattr(self.model.config.get_text_config(), "layer_types", None)
        if not layer_types:
            return sliding_mask
        return {
            "full_attention": mask(is_later),
            "sliding_attention": sliding_mask,
        }

    def remove(self, chosen: Callable[[Generation], bool]) -> list[Generation]:
        """Free and return the chosen requests; the last rows move into the freed ones."""
        running = self.running
        is_chosen = [chosen(generation) for generation in running]
        removed = [*compress(running, is_chosen)]
        if not removed:
            return []
        num_left = len(running) - len(removed)
        sources = [row for row in range(num_left, len(running)) if not is_chosen[row]]
        freed_rows = [row for row in range(num_left) if is_chosen[row]]
        moves = list(zip(sources, freed_rows, strict=True))
        longest = max(generation.length_so_far() for generation in running)
        self._cache.copy_rows(moves, longest)
        for source, freed_row in moves:
            running[freed_row] = running[source]
        del running[num_left:]
        self._settings = None
        return removed

    def clear(self) -> list[Generation]:
        self.drop_prefix()
        self._cache.drop()
        self._settings = None
        return super().clear()

    def drop_prefix(self) -> None:
        self._prefix = ()
        self._latest = ()
        self._cache.drop_prefix()

    def _rebuild(self) -> Settings:
        """Rebuild the batch's tensors after requests were admitted or removed."""
        lengths = [generation.length_so_far() - 1 for generation in self.running]
        last_tokens = [generation.output[-1] for generation in self.running]
        self._longest = max(lengths)
        self._lengths_B = torch.tensor(lengths, device=self._device)
        self._tokens_B = torch.tensor(last_tokens, device=self._device)
        rows_B = torch.arange(len(self.running), device=self._device)
        self._rows_B1 = rows_B[:, None]
        self.adapters.select([generation.adapter for generation in self.running])
        self._settings = self._settings_of(self.running)
        return self._settings
