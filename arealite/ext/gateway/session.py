"""A session: one episode of a foreign agent, its seats and the replies to their requests.

A repeated request gets the reply of the first one. Generations are tasks of the session, so a
client that disconnects does not cancel them.
"""

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from arealite.api.agent import Agent
from arealite.api.task import Task
from arealite.base import errors, log
from arealite.ext.gateway.apis import Api
from arealite.ext.gateway.conversation import SeatConversations
from arealite.ext.gateway.reply import Reply
from arealite.ext.gateway.request_data import ApiError
from arealite.system.health.waits import cancel_all

if TYPE_CHECKING:
    from arealite.ext.gateway.gateway import Gateway

logger = log.get(__name__)
T = TypeVar("T")

KEPT = 32
"""Delivered replies that a seat keeps for repeated requests."""
STATUSES: dict[type[BaseException], tuple[int, str]] = {
    errors.ContextOverflow: (400, "context_length_exceeded"),
    errors.GenerationRefused: (400, "invalid_request"),
    errors.ServerUnavailable: (503, "server_unavailable"),
}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address and the key of a seat, for an agent."""

    base_url: str
    """For OpenAI clients; ends with /v1."""
    anthropic_base_url: str
    """For Anthropic clients."""
    model: str
    api_key: str = field(repr=False)
    seats: "dict[str, Endpoint]" = field(default_factory=dict["str", "Endpoint"], repr=False)
    """The endpoints of all seats of the episode, by name; only of the first seat's endpoint."""


class SessionSeat:
    """One seat of a session: its key, its conversation and its replies."""

    def __init__(self, session: "GatewaySession", agent: Agent, gateway: "Gateway") -> None:
        self.session = session
        self.agent = agent
        self.gateway = gateway
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self.conversation = SeatConversations(gateway.renderer(agent.tokenizer))
        self._replies: list[Reply] = []
        """All undelivered replies and the last delivered ones; repeated requests get them."""

    def reply(
        self,
        api: Api,
        path: str,
        body: bytes,
        *,
        key: str,
        is_retry: bool,
    ) -> Reply:
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
        session = self.session
        stats = self.session.stats
        if session.is_closed:  # while the body was read
            raise session_ended()
        name = f"{path} {hashlib.sha256(body).hexdigest()} {key}"
        is_declared = bool(key) or is_retry
        earlier = self._reply_to(name, is_declared=is_declared)
        if earlier is not None:
            stats["repeated_requests"] += 1
            return earlier
        request = api.decode(body)
        stats["requests"] += 1
        reply = Reply(self, name, request.is_stream)
        self._replies.append(reply)
        task = session.spawn(reply.run(api, request))
        task.add_done_callback(lambda task: self._fail(reply, task))
        return reply

    def _reply_to(self, name: str, *, is_declared: bool) -> Reply | None:
        """Return the latest reply to an equal request; None if the request is a new one.

        Args:
            name: `Reply.name` of the request.
            is_declared: Whether the client declares the request a repeated one. Other requests
                get a reply only until it is delivered.
        """
        for reply in reversed(self._replies):
            is_open = is_declared or not reply.is_delivered
            if reply.name == name and reply.error is None and is_open:
                return reply
        return None

    def _fail(self, reply: Reply, task: asyncio.Task[None]) -> None:
        """End a reply whose task failed. Its request is generated anew when repeated."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        reply.finish(self.session.refusal(error))
        if not reply.responses:
            self._replies.remove(reply)

    def deliver(self, reply: Reply) -> None:
        """Mark a reply as delivered, after its last byte was written."""
        if reply.error is not None or reply.is_delivered:
            return
        reply.is_delivered = True
        self.session.answer = reply.first_text
        delivered = [earlier for earlier in self._replies if earlier.is_delivered]
        if len(delivered) > KEPT:
            self._replies.remove(delivered[0])

    def drop_undelivered(self) -> None:
        """Remove the turns that no client received from the record.

        A turn that a later prompt extends was received, although its stream was not read to the
        end.
        """
        record = self.agent.record
        extended = {id(turn.parent.response) for turn in record.turns if turn.parent}
        for reply in self._replies:
            if reply.is_delivered:
                continue
            for response in reply.responses:
                if id(response) not in extended:
                    record.drop(response)
                    self.session.stats["undelivered_turns"] += 1
        self._replies.clear()


class GatewaySession:
    """One episode of a foreign agent. The environment closes it before it rewards the agents.

    Its context closes it, and raises the session's error in place of the episode's other failure.
    """

    def __init__(self, task: Task, agents: Mapping[str, Agent], gateway: "Gateway") -> None:
        self.id = secrets.token_hex(16)
        self.task = task
        self.agents = agents
        self._gateway = gateway
        self.seats = {name: SessionSeat(self, agent, gateway) for name, agent in agents.items()}
        self.reported: tuple[float, dict[str, float]] | None = None
        """Reward and parts of POST …/reward."""
        self.answer = ""
        """Text of the last delivered answer."""
        self.leased = asyncio.Event()
        """Set when an agent elsewhere has taken the task."""
        self.ended = asyncio.Event()
        """Set by POST …/end, by `close`, and with `error`."""
        self.error: BaseException | None = None
        """The error that fails the episode."""
        self.stats = Counter[str]()
        """requests, repeated_requests, undelivered_turns, sampling_ignored, malformed_calls, and
        branches_REASON."""
        self.in_flight = 0
        self.is_closed = False
        self._tasks = set[asyncio.Task[Any]]()
        endpoints = {name: self._endpoint(seat) for name, seat in self.seats.items()}
        first_endpoint = next(iter(endpoints.values()))
        self.endpoint = replace(first_endpoint, seats=endpoints)
        """Of the first seat."""
        self.touch()

    async def __aenter__(self) -> "GatewaySession":
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.close()
        if self.error is not None and isinstance(error, errors.EpisodeError | None):
            raise self.error

    def _endpoint(self, seat: SessionSeat) -> Endpoint:
        """Return the endpoint of a seat."""
        gateway = self._gateway
        return Endpoint(
            base_url=f"{gateway.url}/v1",
            anthropic_base_url=gateway.url,
            model=gateway.config.model,
            api_key=seat.key,
        )

    def touch(self) -> None:
        """Store the present time as that of the last request."""
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
            return session_ended()
        status, code = STATUSES.get(type(error), (500, "internal_error"))
        message = str(error)
        if status == 500:
            logger.error("request failed", task=self.task.task_id, exc_info=error)
            message = internal(error)
        if status >= 500:
            self.fail(error)
        return ApiError(status, message, code)

    async def close(self) -> None:
        """Cancel running generations, and drop the turns that no client received."""
        self.is_closed = True
        self.ended.set()
        self._gateway.forget(self)
        try:
            await cancel_all(self._tasks)
        finally:
            for seat in self.seats.values():
                seat.drop_undelivered()


def session_ended() -> ApiError:
    """Return the answer to a request of an ended session."""
    return ApiError(410, "the session has ended; use the key of a running session", "session_ended")


def internal(error: BaseException) -> str:
    """Return the message of an error that the client cannot fix."""
    return f"the gateway failed with {type(error).__name__}; see the log of the rollout worker"
