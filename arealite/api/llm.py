"""Language-model generation: request, response, and the client interface.

Requests and responses have token ids. Only agents convert between text and tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from arealite.api.fields import named, opt, part, sub
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.experiment_config import ExperimentConfig


MAX_TOP = 256
"""Largest number of most probable tokens that are recorded."""
TOP_P_HELP = "1: all tokens; less: only tokens whose kept set top_logprobs records are trained"


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of tokens. The defaults sample from the policy itself.

    With top_p, top_k, min_p or min_new_tokens, some tokens cannot be sampled. A token is trained
    only where the `top_logprobs` recorded tokens are all that could be sampled.
    """

    temperature: float = opt(1.0, "0: greedy; the trainer divides logits by it", at_least=0)
    top_p: float = opt(1.0, TOP_P_HELP, above=0, at_most=1)
    top_k: int = opt(-1, "-1: all tokens; fewer: see top_p", at_least=-1)
    min_p: float = opt(
        0.0,
        "lowest probability, relative to the highest; above 0: see top_p",
        at_least=0,
        at_most=1,
    )
    top_logprobs: int = opt(
        0, "most probable tokens recorded at each token; 0: none", at_least=0, at_most=MAX_TOP
    )
    max_new_tokens: int = opt(256, "longest generation, in tokens", at_least=1)
    min_new_tokens: int = opt(0, "fewest tokens of an answer; above 0: see top_p", at_least=0)
    stop: list[str] = sub(list, "strings that end a generation; their tokens stay in the output")
    stop_token_ids: list[int] = sub(list, "token ids that end a generation besides the model's EOS")

    @property
    def truncates(self) -> bool:
        """Whether top_p, top_k or min_p exclude tokens."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def num_truncated(self) -> int:
        """Number of the first tokens of an answer at which some tokens cannot be sampled."""
        return self.max_new_tokens if self.truncates else self.min_new_tokens

    @property
    def smallest_known_top(self) -> int:
        """The smallest `top_logprobs` that can record all tokens that could be sampled."""
        if self.truncates and self.top_p == 1 and self.min_p == 0:
            return self.top_k
        return min(1, self.num_truncated)


@dataclass(frozen=True, kw_only=True)
class ServersClientConfig:
    """Client of the trial's servers, of every kind."""

    request_timeout_s: float = opt(300.0, "timeout of a generation, with resubmissions", above=0)
    connect_timeout_s: float = opt(3.0, "timeout of a connection; then another server", above=0)
    refresh_s: float = opt(1.0, "time between reads of the list of servers", above=0)
    max_connections: int = opt(1024, "open connections of a worker, to all servers", at_least=1)


@dataclass(frozen=True, kw_only=True)
class LLMClientConfig:
    """The client of the LLM servers."""

    type: str = named("llm_client", "servers", "registered name of the client")
    servers: ServersClientConfig = part(ServersClientConfig)


class LLMRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. Filled by the agent."""

    request_id: str
    """Unique id; the server's `rid`, by which a request is aborted."""
    group_id: str
    """Requests of one group share a prompt and use the same server."""
    input_ids: list[int]
    sampling: SamplingConfig
    deadline_s: float | None = None
    """Seconds from now; None: the client's `request_timeout_s`."""
    min_version: int = 0
    """Only servers that have confirmed this version or a newer one get the request."""
    resumed: "LLMResponse | None" = None
    """Tokens that an earlier attempt sampled; the generation continues after them."""
    on_partial: "Callable[[LLMResponse], None] | None" = None
    """Called with the tokens so far (stop_reason "") when a generation is interrupted and
    continues. A server that continues interrupted generations itself does not report them."""
    on_tokens: Callable[[list[int]], None] | None = None
    """Called with each new piece of sampled ids, in order, each token exactly once; makes the
    client stream. The tokens of `resumed` are not new."""
    num_known_tokens: int = 0
    """Number of the first tokens that are prompt and output of an earlier request. The client does
    not check them again, which would take most of its time for a long prompt."""
    json: bytes = b""
    """`input_ids` in JSON; b"": the client encodes them."""
    scores_prompt: bool = False
    """Whether the response should have the logprobs of the prompt's tokens."""
    target_ids: list[list[int]] = []
    """K token ids to score at the place of each token of the prompt but the first one, [T - 1][K];
    -1: none. Only with `scores_prompt`."""
    adapter: str = ""
    """The adapter that samples, of those that servers list; "": that of the policy. `min_version`
    and the versions of tokens are those of the adapter."""
    seed: int | None = None
    """Makes the tokens independent of other requests, at a server that can do that."""

    @property
    def routing_start(self) -> int:
        """First token whose experts are recorded; the parent turn's record ends before it."""
        return max(0, self.num_known_tokens - 1)


class LLMResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled tokens. Filled by the client; the three lists have the same length, N."""

    output_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token at the sampling temperature; with `top_ids`, of the
    distribution that was sampled from, which top_p, top_k and min_p change."""
    versions: list[int]
    """Policy version that sampled each token, as reported by the server."""
    stop_reason: str
    """"stop" (a stop token or string) or "length" (max_new_tokens is reached)."""
    interruptions: int = 0
    """Number of interruptions: retractions reported by the server, and resubmissions."""
    routing: bytes = b""
    """The experts of a mixture, as in `Segment.routing`, for the tokens of prompt and output from
    `LLMRequest.routing_start` to the last but one, which are the inputs; b"": not recorded."""
    top_ids: bytes = b""
    """int32 [N, sampling.top_logprobs]: the most probable tokens, by falling probability; -1: no
    further token can be sampled, or is known."""
    top_logprobs: bytes = b""
    """float32, as `top_ids`: their log-probabilities in the distribution that was sampled from;
    -inf where the id is -1."""
    prompt_logprobs: list[float] = []
    """The logprob of each token of the prompt but the first one, at temperature 1; [] if not
    requested."""
    prompt_top_tokens: list[Any] = []
    """`ServerAnswer.prompt_top_tokens`, if `sampling.top_logprobs` asks for them, too."""
    target_logprobs: bytes = b""
    """float32 [T - 1, K]: the logprobs of `LLMRequest.target_ids`; -inf for -1."""


class LLMClient(ABC):
    """Generates on any live server. An interrupted generation is continued until it is finished."""

    @abstractmethod
    def __init__(self, args: "ExperimentConfig", config: LLMClientConfig) -> None:
        """Create a client of the servers of the run `args`; open no connection yet."""

    @abstractmethod
    async def generate(self, request: LLMRequest) -> LLMResponse:
        """Return the finished generation.

        Raises:
            ContextOverflow: Prompt plus `max_new_tokens` exceed the server's context. The client
                checks this before it sends the request.
            GenerationRefused: The request is invalid.
            ServerUnavailable: No server finished the generation before the deadline.
        """

    async def start(self) -> None:  # noqa: B027  (optional hook)
        """Open connections and wait for the first server."""

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Close connections."""

    async def switch_adapter(  # noqa: B027  (optional hook)
        self, server_id: str, adapter: str, label: str
    ) -> None:
        """Set the version of an adapter that requests name at a server; abort those of others.

        The client continues aborted requests.

        Args:
            server_id: The id of the server's entry.
            adapter: The adapter.
            label: The name of the version there, as in "up@3"; "-1": it has none.
        """

    def stats(self) -> dict[str, float]:
        """Return counters since the start; the keys are metric names without `client/`."""
        return {}


clients = Registry[type[LLMClient]].built_in("llm_client")
