"""The interface to one kind of LLM server: what differs between SGLang, vLLM and others.

A protocol converts between the bytes of a server's HTTP routes and the types of this module. It
does no I/O, so that clients, supervisors and tests can use it. The entry of a server in the name
registry has the protocol's registered name. Pauses and weight updates are a class of their own,
`arealite.impl.publisher.control.ServerControl`, registered under the same name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from arealite.api.llm import LLMRequest, SamplingConfig
from arealite.base import entries
from arealite.base.errors import InvariantError, UserError

DEFAULT_PROTOCOL = "sglang"
"""The protocol of a server whose entry in the name registry names none."""
ADAPTER = "policy-"
"""Begins the name of an adapter that is a version of the policy: `policy-7` is version 7. A server
that serves a version so has this name as its version label, and requests must name it."""
MARK = "@"
"""Stands between the name of another adapter and its version: `up@3` is version 3 of `up`."""
Json = dict[str, Any]
Load = dict[str, int]
"""Numbers of requests: "running" and "waiting", and "capacity" (0: unknown)."""

SERVER_START_S = 600.0
"""How long a supervised server may load its model; its supervisor reports a failure."""


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    """One request for tokens."""

    rid: str
    """Id by which the request can be aborted. No id is a prefix of another one."""
    input_ids: list[int] | msgspec.Raw
    """The prompt and the tokens sampled so far, or their JSON."""
    sampling: SamplingConfig
    num_top: int = 0
    """Most probable tokens that the answer should have at each sampled token."""
    num_sampled: int = 0
    """Tokens at the end of `input_ids` that earlier answers have sampled."""
    ignore_eos: bool = False
    is_stream: bool = False
    with_routing: bool = False
    """Whether the answer should have the experts of each input token."""
    routing_start: int = 0
    """First token of `input_ids` whose experts are wanted."""
    scores_prompt: bool = False
    """Whether the answer should have the log-probabilities of the prompt's tokens. They are
    computed anew, without cached prefixes."""
    target_ids: list[list[int]] = field(default_factory=list[list[int]])
    """As in LLMRequest."""
    adapter: str = ""
    """The adapter that samples; "": none. A server without it must refuse the request."""
    seed: int | None = None
    """As in LLMRequest."""


TokenScore = tuple[float | None, int, Any]
"""[logprob, token id, text or null]; the first token of a prompt has no logprob."""
TopRow = list[TokenScore]
"""(logprob, token id, unused) of the most probable tokens at a position, in any order."""


@dataclass(slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of an output were sampled under `version`."""

    version: str | int | None
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class ServerAnswer:
    """The tokens of an answer, or the new tokens of one event of a streamed answer."""

    output_ids: list[int]
    logprobs: list[float]
    """One for each of `output_ids`."""
    top_tokens: list[TopRow] | None = None
    """One row for each of `output_ids`; None if the server reports none."""
    is_renormalized: bool = False
    """Whether all logprobs are those of the tokens that top_p, top_k and min_p keep; False: of the
    whole vocabulary."""
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    """The versions of all tokens so far; [] if the server does not report them."""
    newest_version: str | int | None = None
    """The server's version at the end of the answer; None if it does not report it."""
    finish: str | None = None
    """ "stop", "length", "abort" or another reason; None before the end of a stream."""
    finish_message: str | None = None
    is_refusal: bool = False
    """Whether the server aborted the request because the request is invalid."""
    num_retractions: int = 0
    """How often the server dropped the KV cache of the request and computed it again."""
    num_tokens: int = 0
    """Tokens so far; in an event of a stream with those of earlier events."""
    text: str = ""
    """Text of the tokens so far; perhaps "" if the request has no stop strings."""
    is_whole_text: bool = True
    """False: `text` lacks the text of earlier events of the stream."""
    expert_ids: np.ndarray | None = None
    """Recorded experts, [inputs, layers, experts per token] in one dimension."""
    prompt_logprobs: list[float] = field(default_factory=list[float])
    """The logprob of each token of the prompt but the first one, NaN for no number; [] if the
    server returns none."""
    prompt_top_tokens: list[TopRow] = field(default_factory=list[TopRow])
    """The most probable tokens at the place of each token of the prompt but the first one."""
    target_logprobs: np.ndarray | None = None
    """The logprobs of `target_ids`, float [T - 1, K]; None: `target_rows` has them, or nothing."""
    target_rows: list[TopRow] = field(default_factory=list[TopRow])
    """At the place of each token of the prompt but the first one, the tokens of all places."""


@dataclass(slots=True, kw_only=True)
class ServerDescription:
    """The description that a server gives of itself."""

    model_path: str
    version: str | int | None
    """Version of its weights; None if it does not report it."""
    context_length: int | None = None
    """Tokens of the longest prompt."""
    model_type: str | None = None
    architectures: list[str] | None = None
    start_id: str | None = None
    """Differs between two starts of the server; None if it reports nothing of that kind."""
    dtype: str | None = None
    quantization: str | None = None
    serves_adapters: bool = False
    """Whether it loads adapters while it runs."""


class ServerProtocol(ABC):
    """Requests and answers of one kind of server. Objects have no state."""

    generate_path: str
    version_path: str
    load_path: str
    describe_paths: tuple[str, ...]
    """Routes whose answers `describe` reads. Only servers of this kind answer the first one."""
    streams_versions: bool
    """Whether a token of a stream has its version before the stream ends."""
    status_s: float = 0.0
    """How long a live server may take to report its version, or to continue: vLLM does so between
    two steps of its model."""
    health_path: str = ""
    """Route that a server answers while it loads weights or computes a step; "": `version_path`
    is such a route."""

    @abstractmethod
    def encode_request(self, request: GenerateRequest) -> bytes:
        """Return the body of a request. Each parameter that changes the distribution is in it."""

    @abstractmethod
    def decode_answer(self, raw: bytes, num_before: int | None = None) -> ServerAnswer:
        """Return an answer, or the new tokens of one event of a streamed answer.

        Args:
            raw: The JSON.
            num_before: Tokens of earlier events of a stream; None: `raw` is a whole answer.

        Raises:
            msgspec.DecodeError: It is not an answer.
            InvariantError: Ids and logprobs belong to different tokens.
        """

    def lacks_adapter(self, status: int, raw: bytes) -> bool:
        """Return whether a server refuses a request because it has no adapter of that name."""
        return False

    @abstractmethod
    def abort_request(self, rid: str) -> tuple[str, Json]:
        """Return route and body of the request that aborts another one."""

    @abstractmethod
    def relabel_request(self, version: str, *, abort: bool) -> tuple[str, Json]:
        """Return route and body of the request that sets the reported version.

        Args:
            version: The new label.
            abort: Abort all running requests.
        """

    @abstractmethod
    def describe(self, answers: Mapping[str, Json]) -> ServerDescription | None:
        """Return what a server says of itself; None if it is another kind of server.

        Args:
            answers: JSON of each of `describe_paths`; {} for a route without such an answer.

        Raises:
            UserError: The server cannot be used; the error says how it must be started.
        """

    @abstractmethod
    def read_version(self, raw: bytes) -> str | int | None:
        """Return the version in an answer of `version_path`; None if it has none."""

    @abstractmethod
    def read_load(self, raw: bytes) -> Load | None:
        """Return the load in an answer of `load_path`; None if it has none."""


class AnswerStream(Protocol):
    """Reads the events of one streamed answer (hook `answer_stream`)."""

    @property
    def failure(self) -> tuple[int, bytes] | None:
        """Status and body of an event that is an error or malformed."""

    @property
    def answer(self) -> ServerAnswer | None:
        """The tokens so far, without a finish reason before the end; None without events."""

    def feed(self, data: bytes) -> None:
        """Read bytes of the answer; pass their tokens to the request's `on_tokens`.

        Raises:
            InvariantError: ids and logprobs belong to different tokens.
        """


AnswerStreamMaker = Callable[[LLMRequest, ServerProtocol], AnswerStream]
"""Hook `answer_stream`: return what reads the events of an answer that a server streams.

The client calls it for each attempt of a request with `on_tokens`. The last entry is used."""


def adapter_name(version: int) -> str:
    """Return the name of a version that is served as an adapter."""
    return f"{ADAPTER}{version}"


def adapter_of(label: str | int | None) -> str:
    """Return the adapter that requests to a server with a version label must name; "" for none."""
    name = str(label)
    is_adapter = name.startswith(ADAPTER) and name.removeprefix(ADAPTER).isdigit()
    return name if is_adapter else ""


def name_with_version(adapter: str, version: int) -> str:
    """Return the name of a version of an adapter at a server that has a name for each version."""
    return f"{adapter}{MARK}{version}"


def version_text(label: str | int | None) -> str:
    """Return the version in a label, without the name of an adapter."""
    return str(label).rpartition(MARK)[2].removeprefix(ADAPTER)


def part_of_entry(group: str, entry: Mapping[str, Any]) -> Any:
    """Return what a group has for the protocol of a server.

    Args:
        group: "server_protocol" or "server_control".
        entry: Content of the server's entry in the name registry.

    Raises:
        UserError: no installed package has it.
    """
    name = entry.get("protocol", DEFAULT_PROTOCOL)
    target = entries.find(group, name)
    if target is None:
        raise UserError(
            f"{entry['address']} speaks the protocol {name!r}, which no package here knows. "
            "Install the package that started this server."
        )
    return entries.load(target)


def mismatch(num_tokens: int, num_logprobs: int) -> InvariantError:
    """Return the error for ids and logprobs of different tokens."""
    return InvariantError(
        f"a server returned {num_tokens} tokens and {num_logprobs} logprobs "
        "that do not belong to them, or are no numbers; "
        "start it with logprobs enabled, look for weights that are not finite, "
        "or report it to its authors."
    )
