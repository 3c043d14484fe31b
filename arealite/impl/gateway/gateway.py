"""The HTTP server of foreign agents: it finds the seat of a key and answers its requests.

Each key belongs to one seat of one session. Errors have the form of the API of their path.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

import arealite
from arealite.api.agent import Agent
from arealite.api.gateway_config import GatewayConfig
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.base import log
from arealite.base.errors import EpisodeError
from arealite.base.places import check_address
from arealite.impl.gateway.apis import APIS
from arealite.impl.gateway.exchange import Api, ApiError
from arealite.impl.gateway.families import family_of
from arealite.impl.gateway.rendering import Renderer
from arealite.impl.gateway.session import (
    ENDED,
    Reply,
    Session,
    SessionSeat,
    Shared,
    internal_error,
)
from arealite.impl.http_guard import refusal_of_page
from arealite.impl.http_limits import LimitedRunner

logger = log.get(__name__)
encode = msgspec.json.Encoder().encode

OPEN = frozenset(("/health", "/openapi.json"))
"""Paths that need no key."""
COUNT_TOKENS = "/v1/messages/count_tokens"
SESSIONS = "/v1/rl/sessions"
KEEP_ALIVE_S = 3.0
"""A stream without events for this long gets a keep-alive."""
WRITE_S = 30.0
"""A connection is closed if its client does not read for this long."""
LEASE_S, MAX_LEASE_S = 20.0, 300.0
"""Default and largest time that a request for a task waits."""
MAX_ENDED = 2**16
"""Keys of ended sessions that get 410 instead of 401."""
RETRY = {"Retry-After": "1"}


class LeaseLost(EpisodeError):
    """The agent that took the task disconnected before it received the session's key."""

    failure_class = "lease_lost"


class LeaseBody(msgspec.Struct):
    """Body of POST /v1/rl/sessions."""

    wait_s: float = LEASE_S
    """Longest time to wait for a task."""


class RewardBody(msgspec.Struct):
    """Body of POST /v1/rl/sessions/{id}/reward."""

    reward: float | None = None
    """None: the sum of the parts."""
    parts: dict[str, float] = {}


class Gateway:
    """Serves the sessions of one environment in the worker's event loop."""

    def __init__(self, config: GatewayConfig, *, args: TrialConfig, token: str = "") -> None:
        """Initialize the gateway.

        Args:
            config: Address and limits.
            args: Options of the trial.
            token: Token that agents need to take tasks; "": none can take tasks.
        """
        self.config, self.args, self._token = config, args, token.encode()
        self.lease: Callable[[], Awaitable[Session]] | None = None
        """Waits for a task that an agent can take, and opens its session; None: agents do not
        take tasks. It is cancelled when the agent's request ends."""
        self.url = ""
        self.sessions: dict[str, Session] = {}
        self._seats: dict[bytes, SessionSeat] = {}
        """By hash of the key."""
        self._ended: dict[bytes, None] = {}
        """Hashes of the keys of ended sessions, oldest first."""
        self._shared: Shared | None = None
        self._stack = AsyncExitStack()
        hosts = (config.host, config.public_host, args.cluster.host, socket.gethostname())
        self._names = {"localhost", *(host.lower() for host in hosts if host)}

    async def start(self) -> None:
        """Listen, and set `url`.

        Raises:
            UserError: The address cannot be used.
        """
        config, host = self.config, self.config.host or "127.0.0.1"
        await asyncio.to_thread(check_address, host, config.port, at="gateway")
        app = web.Application(middlewares=[self._serve], client_max_size=config.max_body_mb * 2**20)
        app.add_routes(self._routes())
        bodies = dict.fromkeys(APIS, config.max_body_mb * 2**20)
        runner = LimitedRunner(app, bodies=bodies, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, host, config.port).start()
        public = self.args.cluster.host if host in ("0.0.0.0", "::") else host
        public = config.public_host or public
        public = f"[{public}]" if ":" in public else public
        self.url = f"http://{public}:{runner.addresses[0][1]}"

    async def close(self) -> None:
        """End all sessions, and stop listening."""
        for session in [*self.sessions.values()]:
            await session.close()
        await self._stack.aclose()

    def open(self, task: Task, agents: Mapping[str, Agent]) -> Session:
        """Return a new session.

        Args:
            task: The task of the episode.
            agents: The agents of all seats by name; the first one is the default.

        Raises:
            UserError: `gateway.parser` is no known format.
        """
        if self._shared is None:
            tokenizer = next(iter(agents.values())).tokenizer
            family = family_of(tokenizer, self.config.parser)
            self._shared = Shared(self.config, Renderer(tokenizer, family), family, self.url)
        session = Session(task, agents, self._shared, on_close=self._forget)
        self.sessions[session.id] = session
        self._seats |= {_hash(seat.key): seat for seat in session.seats}
        return session

    def _forget(self, session: Session) -> None:
        self.sessions.pop(session.id, None)
        for name in [_hash(seat.key) for seat in session.seats]:
            self._seats.pop(name, None)
            self._ended[name] = None
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    # ------------------------------------------------------------ requests

    @web.middleware
    async def _serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request; errors have the form of its API."""
        try:
            return await self._admit(request, handler)
        except ApiError as error:
            return _refused(request, error)
        except web.HTTPException as error:
            text = f"{request.path}: {error.text or error.reason}"
            return _refused(request, ApiError(error.status, text))
        except ConnectionError:
            raise
        except Exception as error:
            logger.exception("request failed", path=request.path)
            return _refused(request, internal_error(error))

    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check a request before its body is read, and count those in flight of its session."""
        if why := refusal_of_page(request, self._names):
            raise ApiError(403, why, "forbidden")
        if request.path in OPEN:
            return await handler(request)
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
            raise ApiError(415, "compressed bodies are not supported; send it uncompressed")
        if (seat := self._seat(request)) is None:
            return await handler(request)
        session, most = seat.session, self.config.max_in_flight
        if session.in_flight >= most:
            text = f"the session has {most} requests in flight; wait for their answers"
            raise ApiError(429, text, "too_many_requests", RETRY)
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
        ended, headers = False, request.headers
        scheme, _, bearer = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        for key in (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")):
            if seat := self._seats.get(name := _hash(key)):
                return seat
            sent = key.encode(errors="surrogateescape")
            if self._token and hmac.compare_digest(sent, self._token):
                return None
            ended = ended or name in self._ended
        if ended:
            raise ApiError(410, ENDED, "session_ended")
        text = "the API key is missing, or is not of a session of this gateway"
        raise ApiError(401, text, "invalid_api_key")

    def _own_seat(self, request: web.Request) -> SessionSeat:
        """Return the seat of the request's key.

        Raises:
            ApiError: The request has the token of agents that take tasks instead.
        """
        if (seat := self._seat(request)) is None:
            raise ApiError(401, "this token only takes tasks; use the key of a session")
        return seat

    def _routes(self) -> list[web.RouteDef]:
        async def models(request: web.Request) -> web.Response:
            return _json({"object": "list", "data": [self._model()]})

        async def model(request: web.Request) -> web.Response:
            if (name := request.match_info["name"]) != self.config.model:
                raise ApiError(404, f"model {name!r} is unknown; use {self.config.model!r}")
            return _json(self._model())

        async def health(request: web.Request) -> web.Response:
            return _json({"status": "ok", "sessions": len(self.sessions)})

        async def openapi(request: web.Request) -> web.Response:
            return _json(describe())

        gets = {"/health": health, "/openapi.json": openapi, "/v1/models": models}
        gets |= {"/v1/models/{name:.+}": model, SESSIONS + "/{id}": self._state}
        gets |= {SESSIONS + "/{id}/trace": self._trace}
        posts = dict.fromkeys(APIS, self._generate) | {COUNT_TOKENS: self._count_tokens}
        posts |= {SESSIONS: self._lease, SESSIONS + "/{id}/reward": self._reward}
        posts |= {SESSIONS + "/{id}/end": self._end}
        made = [web.get(path, handler) for path, handler in gets.items()]
        return made + [web.post(path, handler) for path, handler in posts.items()]

    def _model(self) -> dict[str, object]:
        name = self.config.model
        return {"id": name, "object": "model", "created": 0, "owned_by": "arealite"}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a generation, streamed or not."""
        api, seat, headers = APIS[request.path], self._own_seat(request), request.headers
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
            while not reply.is_done:
                await reply.changed()
            if reply.error is not None:
                raise reply.error
            response = web.Response(body=reply.chunks[0], content_type="application/json")
            await _write(request, response)
        seat.deliver(reply)
        return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        seat, body = self._own_seat(request), await request.read()
        return _json({"input_tokens": await seat.count_tokens(APIS[COUNT_TOKENS], body)})

    # ------------------------------------------------------------ agents that take tasks

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        """Wait for a task; return it with the keys of its session."""
        if self._seat(request) is not None or self.lease is None:
            raise ApiError(403, "tasks need the token of gateway.token_env", "forbidden")
        wait_s = _decode(await request.read(), LeaseBody).wait_s
        try:
            async with asyncio.timeout(min(wait_s, MAX_LEASE_S)):
                session = await self.lease()
        except TimeoutError:
            raise ApiError(429, "no task is waiting; retry later", "no_task", RETRY) from None
        endpoint = session.endpoint
        seats = {name: seat.api_key for name, seat in endpoint.seats.items()}
        leased = {
            "session_id": session.id,
            "task": session.task,
            "model": endpoint.model,
            "base_url": endpoint.base_url,
            "anthropic_base_url": endpoint.anthropic_base_url,
            "api_key": endpoint.api_key,
            "seats": seats,
        }
        response = _json(leased)
        try:
            await _write(request, response)
        except (ConnectionError, asyncio.CancelledError):
            text = "the agent disconnected before it received its session"
            session.fail(LeaseLost(f"{session.task.task_id}: {text}"))
            raise
        session.touch()
        return response

    def _session(self, request: web.Request) -> Session:
        """Return the session in the path; `current` is the session of the key.

        Raises:
            ApiError: It does not run, or the key belongs to another session.
        """
        seat, name = self._seat(request), request.match_info["id"]
        own = None if seat is None else seat.session
        session = own if own is not None and name == "current" else self.sessions.get(name)
        if session is None or own not in (None, session):
            raise ApiError(404, f"session {name!r} does not run, or has another key", "not_found")
        session.touch()
        return session

    async def _reward(self, request: web.Request) -> web.Response:
        """Store the reward of a session; a later one replaces it."""
        session, body = self._session(request), _decode(await request.read(), RewardBody)
        value = math.fsum(body.parts.values()) if body.reward is None else body.reward
        if not (math.isfinite(value) and all(map(math.isfinite, body.parts.values()))):
            raise ApiError(400, "reward and parts must be finite numbers", "invalid_request")
        session.reported = value, body.parts
        return _json(_describe(session))

    async def _end(self, request: web.Request) -> web.Response:
        """End a session: its environment scores and closes it."""
        session = self._session(request)
        session.ended.set()
        return _json(_describe(session))

    async def _state(self, request: web.Request) -> web.Response:
        return _json(_describe(self._session(request)))

    async def _trace(self, request: web.Request) -> web.Response:
        session = self._session(request)
        traces = [trace for seat in session.seats for trace in seat.traces]
        return _json(_describe(session) | {"turns": traces})


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=16).digest()


def _describe(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "task_id": session.task.task_id,
        "status": "ended" if session.ended.is_set() else "running",
        "reward": session.reported and session.reported[0],
        "stats": session.stats,
    }


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ApiError(400, f"the body is invalid: {error}", "invalid_request") from error


def _json(data: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(data), status=status, content_type="application/json")


def _refused(request: web.Request, error: ApiError) -> web.Response:
    """Return an error in the form of the API of the request's path."""
    path = request.path
    is_anthropic = path.startswith("/v1/messages")
    api = APIS.get(path) or APIS["/v1/messages" if is_anthropic else "/v1/chat/completions"]
    body, headers = api.error(error), error.headers
    return web.Response(
        body=body, status=error.status, headers=headers, content_type="application/json"
    )


async def _write(request: web.Request, response: web.StreamResponse, data: bytes = b"") -> None:
    """Send a response to its end; or, if there is `data`, this part of a stream.

    Raises:
        ConnectionError: The client has disconnected, or does not read.
    """
    try:
        async with asyncio.timeout(WRITE_S):
            await response.prepare(request)
            if data:
                await response.write(data)
            else:
                await response.write_eof()
            await request.writer.drain()
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read its answer") from error
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client has disconnected")


async def _stream(request: web.Request, reply: Reply, api: Api) -> web.StreamResponse:
    """Send the events of a reply from the first one on, as they come.

    Raises:
        ApiError: The request failed before its first event.
        ConnectionError: The client has disconnected, or does not read.
    """
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response, sent = web.StreamResponse(headers=headers), 0
    while not reply.is_done or sent < len(reply.chunks):
        data, sent = b"".join(reply.chunks[sent:]), len(reply.chunks)
        if not data:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await reply.changed()
                continue
            except TimeoutError:
                data = api.keep_alive
        await _write(request, response, data)
    if reply.error is not None:
        if not response.prepared:
            raise reply.error
        await _write(request, response, api.failed(reply.error))
    await _write(request, response)
    return response


def describe() -> dict[str, object]:
    """Return the OpenAPI description of the routes."""
    kinds = {path: api.request_type for path, api in APIS.items()}
    kinds |= {SESSIONS: LeaseBody, SESSIONS + "/{id}/reward": RewardBody}
    refs, schemas = msgspec.json.schema_components(
        kinds.values(), ref_template="#/components/schemas/{name}"
    )
    posts = {**dict(zip(kinds, refs, strict=True)), SESSIONS + "/{id}/end": {}}
    paths = {path: {"post": _operation(path, schema)} for path, schema in posts.items()}
    gets = ("/v1/models", *OPEN, SESSIONS + "/{id}", SESSIONS + "/{id}/trace")
    paths |= {path: {"get": _operation(path, None)} for path in gets}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "AReaLite gateway", "version": arealite.__version__},
        "security": [{name: []} for name in keys],
        "components": {"schemas": schemas, "securitySchemes": keys},
        "paths": paths,
    }


def _operation(path: str, schema: object | None) -> dict[str, object]:
    """Return the OpenAPI description of one route."""
    statuses = (200, 400, 401, 403, 404, 410, 413, 415, 429, 503)
    known: dict[str, Any] = {str(status): {"description": str(status)} for status in statuses}
    operation: dict[str, object] = {"responses": known}
    if schema is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    if "{id}" in path:
        name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    return operation
