"""The HTTP server of foreign agents: it finds the seat of a key and answers its requests.

Each key belongs to one seat of one session. Errors have the form of the API of their path.
"""

import asyncio
import hmac
import math
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from arealite.api.agent import Agent
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.base import log
from arealite.base.errors import EpisodeError
from arealite.base.folder_checks import check_address
from arealite.base.proxies import bypass_proxies
from arealite.ext.gateway.apis import APIS, Api
from arealite.ext.gateway.config import GatewayConfig
from arealite.ext.gateway.families import family_of
from arealite.ext.gateway.openapi import SESSIONS, decode_lease, decode_reward, describe
from arealite.ext.gateway.rendering import Renderer
from arealite.ext.gateway.reply import Reply
from arealite.ext.gateway.request_data import ApiError
from arealite.ext.gateway.session import GatewaySession, SessionSeat, internal, session_ended
from arealite.ext.http_server.http_guard import refusal_of_page
from arealite.ext.http_server.http_limits import LimitedRunner

logger = log.get(__name__)
encode = msgspec.json.Encoder().encode

OPEN = frozenset(("/health", "/openapi.json"))
"""Paths that need no key."""
COUNT_TOKENS = "/v1/messages/count_tokens"
KEEP_ALIVE_S = 3.0
"""A stream without events for this long gets a keep-alive."""
WRITE_S = 30.0
"""A connection is closed if its client does not read for this long."""
MAX_LEASE_S = 300.0
"""Longest time that a request for a task waits."""
MAX_ENDED = 2**16
"""Keys of ended sessions that get 410 instead of 401."""


class Gateway:
    """Serves the sessions of one environment in the worker's event loop."""

    def __init__(self, config: GatewayConfig, *, args: TrialConfig, token: str = "") -> None:
        """Initialize the gateway.

        Args:
            config: Address and limits.
            args: Options of the trial.
            token: Token that agents need to take tasks; "": none can take tasks.
        """
        self.config = config
        self.args = args
        self._token = token.encode()
        self.offered = asyncio.Queue[GatewaySession]()
        """Sessions that agents can take."""
        self.url = ""
        self.context: int | None = None
        """Context length of the servers; None: not known yet."""
        self.warned = set[str]()
        """Options of requests that were logged as ignored."""
        self.sessions: dict[str, GatewaySession] = {}
        self._seats: dict[str, SessionSeat] = {}
        """The seats of running sessions, by their API key."""
        self._ended: dict[str, None] = {}
        """Keys of ended sessions, oldest first."""
        self._renderer: Renderer | None = None
        hosts = (
            config.host,
            config.public_host,
            args.cluster.host,
            socket.gethostname(),
        )
        self._names = {"localhost", *(host.lower() for host in hosts if host)}
        """Names of this host, in lower case."""
        max_body_bytes = config.max_body_mb * 2**20
        app = web.Application(middlewares=[self._serve], client_max_size=max_body_bytes)
        for route, handler in self._routes().items():
            method, path = route.split()
            app.router.add_route(method, path, handler)
        self._runner = LimitedRunner(
            app,
            bodies=dict.fromkeys(APIS, max_body_bytes),
            shutdown_timeout=0.1,
        )

    async def start(self, path: str = "") -> None:
        """Listen, and set `url`.

        Args:
            path: Path of a Unix socket at which the gateway listens, too; "": none.

        Raises:
            UserError: The address cannot be used.
        """
        config = self.config
        host = self.config.host or "127.0.0.1"
        runner = self._runner
        await asyncio.to_thread(check_address, host, config.port, at="gateway")
        await runner.setup()
        await web.TCPSite(runner, host, config.port).start()
        if path:
            await web.UnixSite(runner, path).start()
        public_host = config.public_host or self._public_host(host)
        port = runner.addresses[0][1]
        self.url = f"http://{public_host}:{port}"
        bypass_proxies(public_host.strip("[]"))

    def _public_host(self, host: str) -> str:
        """Return the host of URLs for the address at which the gateway listens."""
        if host in ("0.0.0.0", "::"):
            host = self.args.cluster.host
        return f"[{host}]" if ":" in host else host

    async def close(self) -> None:
        """End all sessions, and stop listening."""
        for session in [*self.sessions.values()]:
            await session.close()
        await self._runner.cleanup()

    def open(self, task: Task, agents: Mapping[str, Agent]) -> GatewaySession:
        """Return a new session. The gateway must listen.

        Args:
            task: The task of the episode.
            agents: The agents of all seats by name; the first one is the default.

        Raises:
            UserError: `gateway.parser` is no known format.
        """
        session = GatewaySession(task, agents, self)
        self.sessions[session.id] = session
        self._seats |= {seat.key: seat for seat in session.seats.values()}
        return session

    def renderer(self, tokenizer: Any) -> Renderer:
        """Return the renderer of all sessions."""
        if self._renderer is None:
            family = family_of(tokenizer, self.config.parser)
            self._renderer = Renderer(tokenizer, family)
        return self._renderer

    def forget(self, session: GatewaySession) -> None:
        """Refuse the keys of a session from now on."""
        self.sessions.pop(session.id, None)
        for seat in session.seats.values():
            self._seats.pop(seat.key, None)
            self._ended[seat.key] = None
        while len(self._ended) > MAX_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]

    # ------------------------------------------------------------ requests

    def _routes(self) -> Mapping[str, Handler]:
        """Return the handlers by method and path."""
        return {
            **dict.fromkeys([f"POST {path}" for path in APIS], self._generate),
            f"POST {COUNT_TOKENS}": self._count_tokens,
            "GET /v1/models": self._models,
            "GET /v1/models/{id:.+}": self._models,
            "GET /health": self._health,
            "GET /openapi.json": self._openapi,
            f"POST {SESSIONS}": self._lease,
            f"POST {SESSIONS}/{{id}}/reward": self._reward,
            f"POST {SESSIONS}/{{id}}/end": self._end,
            f"GET {SESSIONS}/{{id}}": self._state,
            f"GET {SESSIONS}/{{id}}/trace": self._trace,
        }

    @web.middleware
    async def _serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request; errors have the form of its API."""
        try:
            return await self._admit(request, handler)
        except ApiError as refused:
            error = refused
        except web.HTTPException as refused:
            error = ApiError(refused.status, f"{request.path}: {refused.text or refused.reason}")
        except ConnectionError:
            return web.Response()  # to nobody; aiohttp would log the error
        except Exception as failure:
            logger.exception("request failed", path=request.path)
            error = ApiError(500, internal(failure), "internal_error")
        is_anthropic = request.path.startswith("/v1/messages")
        api = APIS["/v1/messages" if is_anthropic else "/v1/chat/completions"]
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return _json(api.error(error), error.status, headers)

    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check a request before its body is read, and count those in flight of its session."""
        refusal = refusal_of_page(request, self._names)
        if refusal:
            raise ApiError(403, refusal, "forbidden")
        if request.path in OPEN:
            return await handler(request)
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
            raise ApiError(415, "compressed bodies are not supported; send it uncompressed")
        seat = self._seat(request)
        if seat is None:
            return await handler(request)
        session = seat.session
        limit = self.config.max_in_flight
        if session.in_flight >= limit:
            raise ApiError(
                429,
                f"the session has {limit} requests in flight; wait for their answers",
                "too_many_requests",
            )
        session.in_flight += 1
        session.touch()
        try:
            return await handler(request)
        finally:
            session.in_flight -= 1
            session.touch()

    def _seat(self, request: web.Request) -> SessionSeat | None:
        """Return the seat of the request's key; None for the token of agents that take tasks.

        Raises:
            ApiError: The key is unknown, or its session has ended.
        """
        is_ended = False
        for key in _keys(request):
            seat = self._seats.get(key)
            if seat is not None:
                return seat
            key_bytes = key.encode(errors="replace")
            if self._token and hmac.compare_digest(key_bytes, self._token):
                return None
            is_ended = is_ended or key in self._ended
        if is_ended:
            raise session_ended()
        if request.path == SESSIONS:
            name = self.config.token_env
            raise ApiError(
                401,
                f"tasks need the token of gateway.token_env={name} as the API key (${name})",
                "invalid_api_key",
            )
        raise ApiError(
            401,
            "the API key is missing, or is not of a session of this gateway",
            "invalid_api_key",
        )

    def _own_seat(self, request: web.Request) -> SessionSeat:
        """Return the seat of the request's key.

        Raises:
            ApiError: The request has the token of agents that take tasks instead.
        """
        seat = self._seat(request)
        if seat is None:
            raise ApiError(401, "this token only takes tasks; use the key of a session")
        return seat

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a generation, streamed or not."""
        api = APIS[request.path]
        seat = self._own_seat(request)
        headers = request.headers
        reply = seat.reply(
            api,
            request.path,
            await request.read(),
            key=headers.get("Idempotency-Key", ""),
            is_retry=headers.get("x-stainless-retry-count", "0") != "0",
        )
        if reply.is_stream:
            response = await _stream(request, reply, api)
        else:
            response = await _whole(request, reply)
        seat.deliver(reply)
        return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        seat = self._own_seat(request)
        api = APIS[COUNT_TOKENS]
        chat_request = api.decode(await request.read())
        prompt = await seat.conversation.ask(chat_request, is_count_only=True)
        return _json({"input_tokens": len(prompt.ids)})

    async def _models(self, request: web.Request) -> web.Response:
        name = request.match_info.get("id")
        model_name = self.config.model
        model = {
            "id": model_name,
            "object": "model",
            "created": 0,
            "owned_by": "arealite",
        }
        if name is None:
            return _json({"object": "list", "data": [model]})
        if name != model_name:
            raise ApiError(404, f"model {name!r} is unknown; use {model_name!r}", "model_not_found")
        return _json(model)

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "sessions": len(self.sessions)})

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(describe(self._routes()))

    # ------------------------------------------------------------ agents that take tasks

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        """Wait for a task; return it with the keys of its session."""
        if self._seat(request) is not None:
            raise ApiError(403, "tasks need the token of gateway.token_env", "forbidden")
        lease = decode_lease(await request.read() or b"{}")
        session = await self._next_offered(min(lease.wait_s, MAX_LEASE_S))
        session.touch()
        session.leased.set()
        keys = {name: seat.key for name, seat in session.seats.items()}
        response = _json(
            {
                **vars(session.endpoint),
                "session_id": session.id,
                "task": session.task,
                "seats": keys,
            }
        )
        try:
            await _write(request, response)
        except (ConnectionError, asyncio.CancelledError):
            task_id = session.task.task_id
            session.fail(
                EpisodeError(f"{task_id}: its agent disconnected before it received the key")
            )
            raise
        return response

    async def _next_offered(self, wait_s: float) -> GatewaySession:
        """Wait for a session that agents can take and that has not ended.

        Raises:
            ApiError: 429: there is none in `wait_s` seconds.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    session = await self.offered.get()
                    if not session.ended.is_set():
                        return session
        except TimeoutError:
            raise ApiError(429, "no task is waiting; retry later", "no_task") from None

    def _session(self, request: web.Request) -> GatewaySession:
        """Return the session in the path; `current` is the session of the key.

        Raises:
            ApiError: It does not run, or the key belongs to another session.
        """
        seat = self._seat(request)
        name = request.match_info["id"]
        session = self.sessions.get(name) if seat is None else seat.session
        if session is None or name not in (session.id, "current"):
            raise ApiError(404, f"session {name!r} does not run, or has another key", "not_found")
        session.touch()
        return session

    async def _reward(self, request: web.Request) -> web.Response:
        """Store the reward of a session; a later one replaces it."""
        session = self._session(request)
        body = decode_reward(await request.read())
        is_empty = body.reward is None and not body.parts
        reward = sum(body.parts.values()) if body.reward is None else body.reward
        if is_empty or not math.isfinite(reward):
            raise ApiError(
                400,
                f"send a finite reward, parts, or both; got {body.reward} and {body.parts}",
                "invalid_request",
            )
        session.reported = reward, body.parts
        return await self._state(request)

    async def _end(self, request: web.Request) -> web.Response:
        """End a session: its environment scores and closes it."""
        self._session(request).ended.set()
        return await self._state(request)

    async def _state(self, request: web.Request) -> web.Response:
        return _json(_describe(self._session(request)))

    async def _trace(self, request: web.Request) -> web.Response:
        """Show where the tokens of each turn come from."""
        session = self._session(request)
        turns = [
            {
                "seat": seat_name,
                "sampled": len(turn.response.output_ids),
                "stop_reason": turn.response.stop_reason,
                **(msgspec.to_builtins(turn.origin) or {}),
            }
            for seat_name, agent in session.agents.items()
            for turn in agent.record.turns
        ]
        return _json({**_describe(session), "turns": turns})


def _keys(request: web.Request) -> tuple[str, str]:
    """Return the API keys of a request, in the forms of both vendors; "" where it has none."""
    headers = request.headers
    scheme, _, token = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    bearer_key = token if scheme.lower() == "bearer" else ""
    return bearer_key, headers.get("x-api-key", "")


def _describe(session: GatewaySession) -> dict[str, Any]:
    """Return the state of a session."""
    reward = None
    if session.reported is not None:
        reward, _ = session.reported
    return {
        "session_id": session.id,
        "task_id": session.task.task_id,
        "status": "ended" if session.ended.is_set() else "running",
        "reward": reward,
        "stats": session.stats,
    }


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(
        body=body if isinstance(body, bytes) else encode(body),
        status=status,
        headers=headers,
    )


async def _write(request: web.Request, response: web.StreamResponse, part: bytes = b"") -> None:
    """Send a response to its end; or, if there is a `part`, this part of a stream.

    Raises:
        ConnectionError: The client has disconnected, or does not read.
    """
    try:
        async with asyncio.timeout(WRITE_S):
            await response.prepare(request)
            if part:
                await response.write(part)
            else:
                await response.write_eof()
            await request.writer.drain()
    except TimeoutError:  # the client does not read
        if request.transport is not None:
            request.transport.abort()
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client has disconnected")


async def _whole(request: web.Request, reply: Reply) -> web.Response:
    """Send the body of a reply when it is complete.

    Raises:
        ApiError: The request failed.
        ConnectionError: The client has disconnected, or does not read.
    """
    while not reply.is_done:
        await reply.changed.wait()
    if reply.error is not None:
        raise reply.error
    response = _json(reply.chunks[0])
    await _write(request, response)
    return response


async def _stream(request: web.Request, reply: Reply, api: Api) -> web.StreamResponse:
    """Send the events of a reply from the first one on, as they come.

    Raises:
        ApiError: The request failed before its first event.
        ConnectionError: The client has disconnected, or does not read.
    """
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    num_sent = 0
    while not reply.is_done or num_sent < len(reply.chunks):
        new_events = b"".join(reply.chunks[num_sent:])
        num_sent = len(reply.chunks)
        if not new_events:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await reply.changed.wait()
                    continue
            new_events = api.keep_alive
        await _write(request, response, new_events)
        reply.written = max(reply.written, num_sent)
    reply.settle()
    if reply.error is not None:
        if not response.prepared:
            raise reply.error
        await _write(request, response, api.failed(reply.error))
    await _write(request, response)
    return response
