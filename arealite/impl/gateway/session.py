"""A session: one episode of a foreign agent, its seats and the answers to their requests.

Each request has one Reply. A repeated request gets the Reply of the first one. Generations are
tasks of the session, so a client that disconnects does not cancel them.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from arealite.api.agent import Agent
from arealite.api.gateway_config import GatewayConfig
from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.task import Task
from arealite.api.turns import Origin
from arealite.base import log
from arealite.base.errors import ContextOverflow, GenerationRefused, ServerUnavailable
from arealite.impl.gateway.conversation import Conversation, Prompt
from arealite.impl.gateway.exchange import Answer, Api, ApiError, ChatRequest, Delta
from arealite.impl.gateway.families import Family
from arealite.impl.gateway.parser import Parser
from arealite.impl.gateway.rendering import Renderer

logger = log.get(__name__)
T = TypeVar("T")

MAX_N = 128
"""Largest `n` of a request."""
MAX_PARTS = 2**17
"""Largest number of brackets and braces of a body. Each list or object of it costs CPU time."""
REPLAY_BYTES = 2**18
"""Bytes of delivered answers that a seat keeps for repeated requests, besides the last answer."""
ENDED = "the session has ended; use the key of a running session"


@dataclass(frozen=True)
class Endpoint:
    """The address and the key of a seat, for an agent."""

    base_url: str
    """For OpenAI clients; ends with /v1."""
    anthropic_base_url: str
    """For Anthropic clients."""
    model: str
    api_key: str = field(repr=False)
    seats: dict[str, Endpoint] = field(default_factory=dict["str", "Endpoint"], repr=False)
    """The endpoints of all seats of the episode, by name; only of the first seat's endpoint."""


class TurnTrace(msgspec.Struct):
    """One answer, as /trace shows it."""

    seat: str
    id: str
    prompt_tokens: int
    taken: int
    """Tokens of the prompt that were taken from the conversation."""
    rendered: int
    """Tokens of the prompt that were rendered and tokenised anew."""
    reason: str
    """Why a branch began; "" if the prompt extends an earlier answer."""
    output_tokens: int
    stop_reason: str
    is_delivered: bool = False


class Reply:
    """The answer to a request, and to all requests that repeat it."""

    def __init__(self, name: bytes, digest: bytes, is_stream: bool) -> None:
        self.name, self.digest, self.is_stream = name, digest, is_stream
        """The idempotency key, else the digest; the hash of path and body of the request."""
        self.id = secrets.token_hex(12)
        """Id of the first answer."""
        self.chunks: list[bytes] = []
        """The body, or the events of the stream so far."""
        self.text = ""
        """Text of the first answer."""
        self.responses: list[LLMResponse] = []
        self.traces: list[TurnTrace] = []
        self.error: ApiError | None = None
        self.is_done = self.is_delivered = False
        self._changed = asyncio.Event()

    def add(self, chunk: bytes) -> None:
        """Append the body or an event."""
        self.chunks.append(chunk)
        self._wake()

    def finish(self, error: ApiError | None) -> None:
        """End the reply."""
        self.is_done, self.error = True, error
        self._wake()

    async def changed(self) -> None:
        """Wait for the next chunk or the end."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()


@dataclass
class Shared:
    """What all sessions of a gateway use."""

    config: GatewayConfig
    renderer: Renderer
    family: Family
    url: str
    context: int | None = None
    """Context length of the servers; None: not known yet."""
    warned: set[str] = field(default_factory=set[str])


class SessionSeat:
    """One seat of a session: its key, its conversation and its replies."""

    def __init__(self, session: Session, name: str, agent: Agent, shared: Shared) -> None:
        self.session, self.name, self.agent, self.shared = session, name, agent, shared
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self.conversation = Conversation(shared.renderer)
        self.traces: list[TurnTrace] = []
        self._replies: dict[bytes, Reply] = {}
        """By name: the replies that a repeated request gets."""
        self._undelivered: dict[Reply, None] = {}
        self._delivered = deque[Reply]()
        self._bytes = 0
        """Of `_delivered`."""

    def reply(self, api: Api, path: str, body: bytes, *, key: str, is_retry: bool) -> Reply:
        """Return the reply to a request; begin to generate it unless the request is repeated.

        Args:
            api: The API of `path`.
            path: Path of the request.
            body: Body of the request.
            key: Idempotency key; "" without one.
            is_retry: Whether the client declares the request a repeated one.

        Raises:
            ApiError: The request is invalid, or the session has ended.
        """
        digest = path.encode() + hashlib.sha256(body).digest()
        name = b"key " + key.encode(errors="surrogateescape") if key else digest
        found, stats = self._replies.get(name), self.session.stats
        if found is not None and (key or is_retry or not found.is_delivered):
            if found.digest != digest:
                text = "this Idempotency-Key was sent with another request; use a new one"
                raise ApiError(400, text, "idempotency_key_reused")
            stats["repeated_requests"] += 1
            return found
        request = decode(api, body)
        stats["requests"] += 1
        reply = self._replies[name] = Reply(name, digest, request.is_stream)
        self._undelivered[reply] = None
        task = self.session.spawn(self._generate(reply, api, request))
        task.add_done_callback(lambda task: self._finish(reply, task))
        return reply

    def deliver(self, reply: Reply) -> None:
        """Mark a reply as delivered, after its last byte was written."""
        if reply.error is not None or reply not in self._undelivered:
            return
        del self._undelivered[reply]
        reply.is_delivered = True
        for trace in reply.traces:
            trace.is_delivered = True
        self.session.answer = reply.text
        self._delivered.append(reply)
        self._bytes += sum(map(len, reply.chunks))
        while self._bytes > REPLAY_BYTES and len(self._delivered) > 1:
            oldest = self._delivered.popleft()
            self._bytes -= sum(map(len, oldest.chunks))
            self._remove(oldest)

    async def count_tokens(self, api: Api, body: bytes) -> int:
        """Return the number of tokens of the prompt of a request."""
        asked = await self.conversation.ask(api, decode(api, body), is_counted=True)
        return len(asked.ids)

    def drop_undelivered(self) -> None:
        """Remove the turns that no client received from the record.

        A turn that a later prompt extends was received, although its stream was not read to the
        end.
        """
        record = self.agent.record
        extended = {id(turn.parent.response) for turn in record.turns if turn.parent is not None}
        lost = [each for reply in self._undelivered for each in reply.responses]
        lost = [response for response in lost if id(response) not in extended]
        for response in lost:
            record.drop(response)
        self.session.stats["undelivered_turns"] += len(lost)
        self._undelivered.clear()

    def _remove(self, reply: Reply) -> None:
        if self._replies.get(reply.name) is reply:
            del self._replies[reply.name]

    def _finish(self, reply: Reply, task: asyncio.Task[None]) -> None:
        """End a reply that failed. Its request is generated anew when repeated."""
        if reply.is_done:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._remove(reply)
        reply.finish(self.session.refusal(error or AssertionError("no answer")))

    async def _generate(self, reply: Reply, api: Api, request: ChatRequest) -> None:
        """Generate the answers of a request, and encode them."""
        model = self.shared.config.model
        if not request.is_stream:
            answers = await self._answers(reply, api, request, lambda _: None)
            reply.chunks.append(api.encode(request, answers, model))
            reply.finish(None)
            return
        deltas = asyncio.Queue[Delta | None]()
        answering = self.session.spawn(self._answers(reply, api, request, deltas.put_nowait))
        answering.add_done_callback(lambda _: deltas.put_nowait(None))
        try:
            if (first := await deltas.get()) is not None:  # an error before it has an HTTP status
                iterator = _until_done(first, deltas, answering)
                async for event in api.events(request, iterator, model, id=reply.id):
                    reply.add(event)
            await answering
            reply.finish(None)
        finally:
            answering.cancel()

    async def _answers(
        self, reply: Reply, api: Api, request: ChatRequest, push: Callable[[Delta], None]
    ) -> list[Answer]:
        """Generate `request.n` answers to one prompt; pass their deltas to `push`."""
        prompt = await self.conversation.ask(api, request)
        reason, stats = prompt.origin.reason, self.session.stats
        if reason not in ("", "first"):
            stats[f"branches_{reason}"] += 1
        sampling = self._sampling(request, len(prompt.ids))
        made = [
            self._answer(reply, request, prompt, sampling, index, push)
            for index in range(request.n)
        ]
        if len(made) == 1:
            answers = [await made[0]]
        else:
            results = await asyncio.gather(*made, return_exceptions=True)
            answers = [each for each in results if isinstance(each, Answer)]
            for error in results:
                if isinstance(error, BaseException):
                    raise error
        reply.text = answers[0].text
        return answers

    async def _answer(
        self,
        reply: Reply,
        request: ChatRequest,
        prompt: Prompt,
        sampling: SamplingConfig,
        index: int,
        push: Callable[[Delta], None],
    ) -> Answer:
        """Generate and parse one answer."""
        agent, length, fed = self.agent, len(prompt.ids), 0
        shared, opening = self.shared, prompt.opening
        parser = Parser(shared.family, agent.tokenizer, request, opening=opening, index=index)

        def feed(ids: list[int]) -> None:
            nonlocal fed
            fed += len(ids)
            for delta in parser.feed(ids):
                push(delta)

        options: Any = {"origin": prompt.origin, "on_tokens": feed if request.is_stream else None}
        try:
            response = await agent.generate(prompt.ids, sampling=sampling, **options)
        except ContextOverflow as error:
            if error.room < 1:
                raise
            shared.context = length + error.room
            sampling = limited(sampling, error.room)
            response = await agent.generate(prompt.ids, sampling=sampling, **options)
        reply.responses.append(response)
        feed(response.output_ids[fed:])
        taken, name = prompt.origin.taken, secrets.token_hex(12) if index else reply.id
        deltas, answer = parser.finish(response, id=name, prompt_tokens=length, cached_tokens=taken)
        self.conversation.add(prompt, answer)
        self._trace(reply, prompt.origin, answer)
        for delta in deltas:
            push(delta)
        return answer

    def _trace(self, reply: Reply, origin: Origin, answer: Answer) -> None:
        tokens = len(answer.response.output_ids) if answer.response else 0
        counts = (answer.prompt_tokens, origin.taken, origin.rendered, origin.reason, tokens)
        trace = TurnTrace(self.name, answer.id, *counts, answer.stop_reason)
        self.traces.append(trace)
        reply.traces.append(trace)
        self.session.stats["malformed_calls"] += answer.malformed

    def _sampling(self, request: ChatRequest, prompt_tokens: int) -> SamplingConfig:
        """Return the sampling options of a request.

        Raises:
            ApiError: The context has no room left, or the trainer cannot use the temperature.
        """
        run, shared = self.agent.seat.sampling, self.shared
        wanted = {"temperature": request.temperature, "top_p": request.top_p}
        wanted = {k: v for k, v in wanted.items() if v is not None and v != getattr(run, k)}
        changes: dict[str, Any] = {}
        if wanted and shared.config.sampling == "request":
            if wanted.get("temperature", 1) <= 0 or not 0 < wanted.get("top_p", 1) <= 1:
                text = "temperature must be above 0, and top_p must be in (0, 1], for training"
                raise ApiError(400, f"{text}; got {wanted}", "unsupported_value")
            changes |= wanted
        elif wanted:
            self.session.stats["sampling_ignored"] += 1
            if not shared.warned & wanted.keys():
                shared.warned |= wanted.keys()
                fix = "gateway.sampling=request uses them"
                logger.warning("sampling options of an agent are ignored", **wanted, hint=fix)
        if request.stop:
            changes["stop"] = [*run.stop, *request.stop]
        room = run.max_new_tokens if request.max_tokens is None else request.max_tokens
        if shared.context is not None:
            room = min(room, shared.context - prompt_tokens)
        if room < 1:
            text = f"the prompt of {prompt_tokens} tokens leaves no room for an answer"
            raise ApiError(400, f"{text} (context: {shared.context})", "context_length_exceeded")
        return limited(replace(run, **changes) if changes else run, room)


class Session:
    """One episode of a foreign agent. The environment closes it before it rewards the agents."""

    def __init__(
        self,
        task: Task,
        agents: Mapping[str, Agent],
        shared: Shared,
        *,
        on_close: Callable[[Session], None],
    ) -> None:
        self.id = secrets.token_hex(16)
        self.task, self.agents = task, agents
        self.seats = [SessionSeat(self, name, agent, shared) for name, agent in agents.items()]
        self.reported: tuple[float, dict[str, float]] | None = None
        """Reward and parts of POST …/reward."""
        self.answer = ""
        """Text of the last delivered answer."""
        self.ended = asyncio.Event()
        """Set by POST …/end, by `close`, and with `error`."""
        self.error: BaseException | None = None
        """The error that fails the episode."""
        self.stats = Counter[str]()
        """requests, repeated_requests, undelivered_turns, sampling_ignored, malformed_calls, and
        branches_REASON."""
        self.in_flight = 0
        self.last_request = 0.0
        """Event loop's time when a request last began or ended."""
        self.is_closed = False
        self._on_close = on_close
        self._tasks = set[asyncio.Task[Any]]()

        def endpoint(seat: SessionSeat, **more: Any) -> Endpoint:
            return Endpoint(f"{shared.url}/v1", shared.url, shared.config.model, seat.key, **more)

        seats = {seat.name: endpoint(seat) for seat in self.seats}
        self.endpoint = endpoint(self.seats[0], seats=seats)
        """Of the first seat."""
        self.touch()

    def touch(self) -> None:
        """Note that the agent is alive."""
        self.last_request = asyncio.get_running_loop().time()

    def spawn(self, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `close` cancels."""
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._discard)
        return task

    def _discard(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio reports it as never retrieved

    def fail(self, error: BaseException) -> None:
        """End the session with the error that fails its episode; the first one counts."""
        self.error = self.error or error
        self.ended.set()

    def refusal(self, error: BaseException) -> ApiError:
        """Return the answer to a request that failed; errors of the run fail the episode."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, asyncio.CancelledError):  # by `close`
            return ApiError(410, ENDED, "session_ended")
        if isinstance(error, ContextOverflow):
            return ApiError(400, str(error), "context_length_exceeded")
        if isinstance(error, GenerationRefused):
            return ApiError(400, str(error), "invalid_request")
        self.fail(error)
        if isinstance(error, ServerUnavailable):
            return ApiError(503, str(error), "server_unavailable", {"Retry-After": "1"})
        logger.error("request failed", task=self.task.task_id, exc_info=error)
        return internal_error(error)

    async def close(self) -> None:
        """Cancel running generations, and drop the turns that no client received."""
        self.is_closed = True
        self.ended.set()
        self._on_close(self)
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            for seat in self.seats:
                seat.drop_undelivered()


def internal_error(error: BaseException) -> ApiError:
    """Return the answer to a request that failed for a reason that its client cannot fix."""
    text = f"the gateway failed with {type(error).__name__}; see the log of the rollout worker"
    return ApiError(500, text, "internal_error")


def decode(api: Api, body: bytes) -> ChatRequest:
    """Decode a request.

    Raises:
        ApiError: The body is invalid.
    """
    if len(body) > MAX_PARTS and (parts := body.count(b"{") + body.count(b"[")) > MAX_PARTS:
        raise ApiError(413, f"the body has {parts} brackets and braces; the limit is {MAX_PARTS}")
    try:
        request = api.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ApiError(400, f"the body is invalid: {error}", "invalid_request") from error
    if not 1 <= request.n <= MAX_N:
        raise ApiError(400, f"n={request.n} must be between 1 and {MAX_N}", "invalid_request")
    return request


def limited(sampling: SamplingConfig, room: int) -> SamplingConfig:
    """Return sampling options with at most `room` new tokens."""
    if room >= sampling.max_new_tokens:
        return sampling
    least = min(room, sampling.min_new_tokens)
    return replace(sampling, max_new_tokens=room, min_new_tokens=least)


async def _until_done(
    first: Delta, deltas: asyncio.Queue[Delta | None], answering: asyncio.Task[list[Answer]]
) -> AsyncIterator[Delta]:
    """Yield deltas until the generation ends; raise its error."""
    delta: Delta | None = first
    while delta is not None:
        yield delta
        delta = await deltas.get()
    await answering
