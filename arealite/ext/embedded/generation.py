"""One request: its sampling parameters, its output so far, and why it ended.

The decode loop writes it; the HTTP side reads it at the end.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

MAX_STOPS = 1024
"""Largest number of stop strings, and of stop token ids, of a request; each token is compared."""

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
"""Bounded, because decoding a number takes quadratic time in its length."""
NonNegative = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TopTokens = tuple[np.ndarray, np.ndarray]
"""Ids (int64) and log-probabilities (float32) of the most probable tokens, by falling probability;
-inf: the token cannot be sampled."""
StopsLimit = msgspec.Meta(max_length=MAX_STOPS)


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sampling parameters of SGLang that this server supports."""

    max_new_tokens: NonNegative | None = 128
    min_new_tokens: NonNegative = 0
    temperature: float = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    stop: str | Annotated[list[str], StopsLimit] | None = None
    stop_token_ids: Annotated[list[Int32], StopsLimit] | None = None
    sampling_seed: NonNegative | None = None
    """Makes the tokens of this request independent of those of other requests."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    """Tokens per event of a stream, after the first event; None: 1."""


@dataclass(eq=False, kw_only=True)
class Generation:
    """A request and its output."""

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    limit: int
    """Maximum number of tokens to generate."""
    stops: frozenset[int]
    """Token ids that end it."""
    stop_strings: tuple[str, ...] = ()
    adapter: str = ""
    """Name of the adapter that it is sampled with; "": the server's default."""
    decode: Callable[[list[int]], str] = str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set in the HTTP thread at the end."""
    interval: int = 0
    """Tokens per event of a stream; 0: no stream."""
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    """Set in the HTTP thread when a stream has new tokens, and at the end."""
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_top: int = 0
    """Number of most probable tokens that are recorded at each sampled token."""
    top_tokens: list[TopTokens] = field(default_factory=lambda: list[TopTokens]())
    """Those of each token in `output`; [] unless they are requested."""
    scored_from: int | None = None
    """First position of the prompt whose later tokens are scored; None: no token is."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """The log-probabilities of the tokens after `scored_from`, at temperature 1."""
    prompt_top_tokens: list[TopTokens] = field(default_factory=lambda: list[TopTokens]())
    """At the same positions."""
    target_ids: list[int] = field(default_factory=list)
    """Tokens that are scored there, too."""
    target_logprobs: list[list[float]] = field(default_factory=lambda: list[list[float]]())
    """[L, C]: the log-probabilities of `target_ids` at each of these positions."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(weight version, start, end) over `output`; all of it at the end. A stream has the tokens
    that the spans cover."""
    wants_routing: bool = False
    routing: list[np.ndarray] = field(default_factory=lambda: list[np.ndarray]())
    """The experts of each input so far, int32 [tokens, layers, experts per token] for each forward
    pass; [] unless it is requested."""
    routing_start: int = 0
    """First token whose experts the answer has."""
    retractions: int = 0
    cached_tokens: int = 0
    finish: dict[str, str | int] | None = None
    error: str | None = None
    """The error for which the request is answered with status 500."""

    @property
    def ended(self) -> bool:
        """Whether the output is complete."""
        return self.finish is not None or self.error is not None

    @property
    def covered(self) -> int:
        """Number of tokens that have a span."""
        return self.spans[-1][2] if self.spans else 0

    @property
    def is_event_due(self) -> bool:
        """Whether the stream must get the tokens since the last span."""
        num_pending = len(self.output) - self.covered
        is_first_event = self.covered == 0
        return num_pending >= (1 if is_first_event else self.interval)

    def length_so_far(self) -> int:
        """Return the number of tokens of prompt and output."""
        return len(self.prompt) + len(self.output)

    def close_span(self, version: str) -> None:
        """Attribute the tokens since the last span to `version`."""
        end = len(self.output)
        if self.spans:
            last_version, last_start, _ = self.spans[-1]
            if last_version == version:
                self.spans[-1] = (version, last_start, end)
                return
        start = self.covered
        if end > start:
            self.spans.append((version, start, end))

    def append(self, token: int, logprob: float) -> None:
        """Append one sampled token; it may end the generation."""
        if self.limit == 0:
            self.finish = {"type": "length", "length": 0}
            return
        self.output.append(token)
        self.logprobs.append(logprob)
        if math.isnan(logprob):
            self.error = "The model's logits are not finite; its weights are broken."
            return
        if token in self.stops:
            self.finish = {"type": "stop", "matched": token}
            return
        stop_string = self._stop_string()
        if stop_string:
            self.finish = {"type": "stop", "matched": stop_string}
        elif len(self.output) >= self.limit:
            self.finish = {"type": "length", "length": len(self.output)}

    def append_top(self, ids_M: np.ndarray, logprobs_M: np.ndarray) -> None:
        """Record the most probable tokens of the last token."""
        if not self.num_top or not self.output:
            return
        ids_K = ids_M[: self.num_top]
        logprobs_K = logprobs_M[: self.num_top]
        self.top_tokens.append((ids_K, logprobs_K))

    def abort(self, message: str) -> None:
        """End the generation with the output it has."""
        self.finish = {"type": "abort", "message": message}

    def _stop_string(self) -> str | None:
        """Return the first stop string at the end of the output; None without one."""
        if not self.stop_strings:
            return None
        # A token may be one byte.
        max_tokens = max(len(stop_string.encode()) for stop_string in self.stop_strings)
        tail = self.decode(self.output[-max_tokens - 8 :])
        return next((string for string in self.stop_strings if string in tail), None)
