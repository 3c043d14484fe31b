"""The routes of the service, as the `tinker` SDK 0.38 calls them.

Errors of a request are JSON with `detail`. The SDK sends a request again after 408, 429 and 5xx.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from arealite.base import log
from arealite.base.errors import UserError, one_line
from arealite.ext.http_server.http_guard import guard
from arealite.ext.http_server.http_limits import LimitedRunner
from arealite.ext.tinker import bodies, messages
from arealite.ext.tinker.checkpoints import PREFIX, TYPES, Checkpoint
from arealite.ext.tinker.config import TinkerConfig
from arealite.ext.tinker.results import JSON, FutureResult, Unavailable
from arealite.ext.tinker.service import Service, Tenant
from arealite.ext.tinker.training import TrainedModel

logger = log.get(__name__)

API = "/api/v1"
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False}
"""Flags of the SDK: it sends the parts of a batch in turn, with its ordinary HTTP client."""
KEYLESS_PATH = f"{API}/healthz"
"""The path that needs no key."""
TENANT = web.RequestKey("tenant", Tenant)
LARGE_BODIES = ("forward_backward", "asample")
"""Requests whose bodies may be as large as `tinker.max_body_mb`."""
B = TypeVar("B", bound=bodies.Body)
BodyHandler = Callable[[Tenant, Any, bytes], object]
"""(tenant, parsed body, raw body) → the answer."""


class TinkerServer:
    """The HTTP server."""

    def __init__(self, service: Service, options: TinkerConfig) -> None:
        self._service = service
        self._options = options

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Serve requests during the body; give the address.

        Raises:
            UserError: The port is in use.
        """
        limit = self._options.max_body_mb * 2**20
        app = web.Application(middlewares=[guard("", self._options.host), self._answer])
        for path, handler in self._routes().items():
            method, _, name = path.partition(" ")
            app.router.add_route(method, f"{API}/{name}", handler)
        runner = LimitedRunner(app, bodies={f"{API}/{name}": limit for name in LARGE_BODIES})
        await runner.setup()
        watching = asyncio.create_task(self._service.watch())
        try:
            site = web.TCPSite(runner, self._options.host, self._options.port)
            try:
                await site.start()
            except OSError as error:
                raise UserError(f"tinker.port={self._options.port}: {one_line(error)}") from error
            host, port, *_ = runner.addresses[0]
            yield f"http://{host}:{port}"
        finally:
            watching.cancel()
            await runner.cleanup()

    def _routes(self) -> dict[str, Handler]:
        service = self._service
        return {
            "GET healthz": _healthz,
            "GET get_server_capabilities": _without_body(lambda *_: service.capabilities()),
            "POST client/config": _post(bodies.Body, lambda *_: CLIENT_CONFIG),
            "POST client/dynamic_config": _post(
                bodies.Body, lambda *_: {"sample_cancel_enabled": True}
            ),
            "POST telemetry": _post(bodies.Body, lambda *_: {"status": "accepted"}),
            "POST create_session": _post(bodies.Body, service.create_session),
            "POST session_heartbeat": _post(bodies.SessionOnly, service.heartbeat),
            "POST sessions/{id}/finish": _without_body(self._finish_session),
            "POST create_model": _post(bodies.CreateModel, service.create_model),
            "POST get_info": _post(bodies.ModelOnly, service.model_info),
            "POST unload_model": _post(bodies.ModelOnly, service.unload_model),
            "POST forward_backward": _forward_backward,
            "POST optim_step": _post(bodies.OptimStep, partial(_submit, TrainedModel.optim_step)),
            "POST save_weights": _post(bodies.SaveWeights, partial(_submit, TrainedModel.save)),
            "POST load_weights": _post(bodies.LoadWeights, service.load_weights),
            "POST save_weights_for_sampler": _post(bodies.SaveForSampler, service.save_for_sampler),
            "POST create_sampling_session": _post(
                bodies.CreateSamplingSession,
                service.create_sampler,
            ),
            "POST join_sampling_session": _post(
                bodies.SamplingSessionOnly,
                _join_sampler,
            ),
            "GET samplers/{id}": _without_body(_describe_sampler),
            "POST asample": _post(bodies.SampleBody, service.sample),
            "POST cancel_future": _post(bodies.RequestOnly, _cancel),
            "POST retrieve_future": _retrieve,
            "POST weights_info": _post(bodies.CheckpointOnly, _weights_info),
            "GET checkpoints": _without_body(_checkpoints),
            "GET training_runs/{id}/checkpoints": _without_body(_checkpoints),
            "DELETE training_runs/{id}/checkpoints/{kind}/{name}": _without_body(
                _remove_checkpoint
            ),
        }

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Find the tenant of a request, before its body is read; answer an error as JSON."""
        try:
            if request.path != KEYLESS_PATH:
                request[TENANT] = self._service.tenant_of(request.headers.get("X-API-Key", ""))
            return await handler(request)
        except UserError as error:
            return _refusal(422, one_line(error))
        except Unavailable as error:
            return _refusal(error.status, str(error))
        except web.HTTPException as error:
            if error.status == 404:
                return _refusal(404, f"this service has no {request.method} {request.path:.200}.")
            return _refusal(error.status, error.reason)

    async def _finish_session(self, tenant: Tenant, request: web.Request) -> object:
        await self._service.finish_session(tenant, request.match_info["id"])
        return {}


# ------------------------------------------------------------ how a route answers


def _without_body(answer: Callable[[Tenant, web.Request], object]) -> Handler:
    """Return a handler that reads no body."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await _json(answer(request[TENANT], request))

    return handle


def _post(kind: type[B], answer: BodyHandler) -> Handler:
    """Return a handler of requests with a JSON body."""

    async def handle(request: web.Request) -> web.StreamResponse:
        tenant = request[TENANT]
        raw = await request.read()
        return await _json(answer(tenant, parse(raw, kind), raw))

    return handle


def _submit(
    method: Callable[[TrainedModel, Any], Awaitable[FutureResult]],
    tenant: Tenant,
    body: Any,
    raw: bytes,
) -> object:
    """Begin a method of the body's model, in its turn; return the id of the result."""
    model = tenant.model(body.model_id)
    request_id = model.submit(body.seq_id, raw, partial(method, model, body))
    return {"request_id": request_id, "model_id": model.id}


def parse(raw: bytes, kind: type[B]) -> B:
    """Decode a JSON body.

    Raises:
        UserError: It is no JSON, or a field is missing or of another type.
    """
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"the body: {one_line(error)}") from error


async def _json(answer: Any) -> web.Response:
    fields = await answer if asyncio.iscoroutine(answer) else answer
    return web.Response(body=msgspec.json.encode(fields), content_type=JSON)


def _refusal(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)


# ------------------------------------------------------------ routes


async def _healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _forward_backward(request: web.Request) -> web.StreamResponse:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise Unavailable(415, "this service takes no compressed bodies.")
    body = messages.parse("ForwardBackwardRequest", await request.read())
    # The SDK may write the fields of a repeated request in another order.
    same_bytes = messages.serialized(body)
    answer = _submit(TrainedModel.forward_backward, request[TENANT], body, same_bytes)
    return await _json(answer)


def _join_sampler(tenant: Tenant, body: bodies.SamplingSessionOnly, raw: bytes) -> object:
    sampler = tenant.sampler(body.sampling_session_id)
    sampler.num_clients += 1
    return {"type": "join_sampling_session", "client_counter": sampler.num_clients - 1}


def _describe_sampler(tenant: Tenant, request: web.Request) -> object:
    sampler = tenant.sampler(request.match_info["id"])
    return {
        "sampler_id": sampler.id,
        "base_model": sampler.base_model,
        "model_path": sampler.path,
    }


async def _retrieve(request: web.Request) -> web.StreamResponse:
    tenant = request[TENANT]
    body = parse(await request.read(), bodies.RequestOnly)
    try:
        result = await tenant.results.wait(body.request_id)
    except Unavailable as error:
        state = {"request_id": body.request_id, "queue_state": "active", "detail": str(error)}
        return web.json_response(state, status=error.status)
    return web.Response(body=result.body, content_type=result.content_type)


def _cancel(tenant: Tenant, body: bodies.RequestOnly, raw: bytes) -> object:
    tenant.results.cancel(body.request_id)
    return None


def _weights_info(tenant: Tenant, body: bodies.CheckpointOnly, raw: bytes) -> object:
    spec = tenant.checkpoints.read(body.tinker_path).spec
    return {
        "base_model": spec.base_model,
        "is_lora": True,
        "lora_rank": spec.rank,
        "train_unembed": False,
        "train_mlp": spec.train_mlp,
        "train_attn": spec.train_attn,
    }


def _checkpoints(tenant: Tenant, request: web.Request) -> object:
    checkpoints = tenant.checkpoints.list(request.match_info.get("id", "*"))
    count = len(checkpoints)
    cursor = {"offset": 0, "limit": count, "total_count": count}
    return {"checkpoints": [*map(_described, checkpoints)], "cursor": cursor}


def _described(checkpoint: Checkpoint) -> dict[str, object]:
    _, _, checkpoint_id = checkpoint.path.removeprefix(PREFIX).partition("/")
    return {
        "checkpoint_id": checkpoint_id,
        "checkpoint_type": TYPES[checkpoint.kind],
        "time": datetime.fromtimestamp(checkpoint.created, UTC).isoformat(),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "user_metadata": checkpoint.user_metadata,
    }


def _remove_checkpoint(tenant: Tenant, request: web.Request) -> object:
    parts = request.match_info
    path = f"{PREFIX}{parts['id']}/{parts['kind']}/{parts['name']}"
    tenant.checkpoints.read(path)
    tenant.checkpoints.remove(path)
    return None
