"""The HTTP side of the embedded server: SGLang's routes over an engine.

In the event loop's thread, which never computes: it parses, waits for the engine and answers.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from aiohttp import web

import arealite
from arealite.base import log
from arealite.impl.http_limits import MAX_BODY
from arealite.impl.server import protocol
from arealite.impl.server.engine import Engine
from arealite.impl.server.protocol import Refusal, ServedModel
from arealite.impl.server.replies import as_error, as_json, encode
from arealite.impl.server.updates import UpdateRoutes

logger = log.get(__name__)

MAX_PROMPT = MAX_BODY + 2**20
"""Largest body of /generate in bytes, at any context length: a prompt of 131,072 tokens. It takes
less than 50 ms of CPU time to decode and check (tools/measure_requests.py)."""

LONG_ANSWER = 10_000
"""Tokens, which take 7 ms of CPU time to encode; a longer answer is encoded in another thread."""


class App:
    """Routes and their handlers."""

    def __init__(
        self, engine: Engine, model: ServedModel, *, is_shared: bool = False, check: Any = None
    ) -> None:
        """Serve `model` with `engine`.

        Args:
            engine: Generates.
            model: Describes the model to clients.
            is_shared: Whether only the engine's owner pauses it and changes the model, no request.
            check: Middleware that refuses requests; None refuses none.
        """
        self.engine = engine
        self.model = model
        self._is_shared, self._checks = is_shared, [check] if check else []
        self._started = int(time.time())

    def make(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[*self._checks, _refusals])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort_request),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.get("/v1/loads", self._loads),
                web.get("/v1/models", self._models),
                web.get("/openapi.json", self._openapi),
            ]
        )
        if not self._is_shared:
            updates = UpdateRoutes(self.engine, self.model)
            app.add_routes(
                [
                    web.post("/pause_generation", self._pause_generation),
                    web.post("/continue_generation", self._continue_generation),
                    web.post("/flush_cache", self._flush_cache),
                    *updates.routes(),
                ]
            )
            app.on_cleanup.append(updates.close)
        return app

    def bodies(self) -> dict[str, int]:
        """Return the largest body in bytes, by path: a prompt, or the layout of all tensors."""
        digits = len(str(self.model.vocab_size)) + len(", ")
        tensors = self.engine.decoder.model.state_dict(keep_vars=True).items()
        layout = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors]
        return {
            "/generate": min(MAX_PROMPT, MAX_BODY + self.model.context_length * digits),
            "/update_weights_from_distributed": MAX_BODY + 2 * len(encode(layout)),
        }

    async def _generate(self, request: web.Request) -> web.Response:
        body = protocol.parse(await request.read(), protocol.GenerateBody)
        generation = protocol.generation_of(body, self.model)
        self.engine.submit([generation])
        try:
            await generation.done.wait()
        except asyncio.CancelledError:  # the client closed its connection
            self.engine.abort(lambda each: each is generation)
            raise
        if generation.error is not None:
            return as_error(500, generation.error)
        version, logprobs = self.engine.version, body.return_logprob
        make = partial(protocol.answer, generation, version=version, logprobs=logprobs)
        is_long = len(generation.output) > LONG_ANSWER
        return as_json(await asyncio.to_thread(make) if is_long else make())

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = protocol.parse(await request.read(), protocol.AbortBody)
        if body.abort_all or body.rid:
            prefix = "" if body.abort_all else body.rid or ""
            self.engine.abort(lambda generation: generation.rid.startswith(prefix))
        return web.Response()  # also for an unknown id

    async def _pause_generation(self, request: web.Request) -> web.Response:
        body = protocol.parse(await request.read(), protocol.PauseGenerationReqInput)
        await asyncio.wrap_future(self.engine.pause(body.mode))
        return as_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.engine.resume())
        return as_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if await asyncio.wrap_future(self.engine.flush()):
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Flush cache failed.\n")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.paused else 200)

    def describe(self) -> dict[str, Any]:
        """Return what /model_info says."""
        model = self.model
        return {
            "model_path": model.weights,
            "served_model_name": model.weights,
            "tokenizer_path": model.folder,
            "is_generation": True,
            "weight_version": model.version,
            "model_type": model.model_type,
            "architectures": model.architectures,
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "paused_s": self.engine.paused_s,
        }

    async def _model_info(self, request: web.Request) -> web.Response:
        return as_json(self.describe())

    async def _server_info(self, request: web.Request) -> web.Response:
        more = {
            "status": "ready",
            "version": arealite.__version__,
            "backend": "arealite-embedded",
            "tp_size": 1,
            "dp_size": 1,
            "dtype": str(self.engine.decoder.model.dtype).removeprefix("torch."),
            "internal_states": [self.engine.stats],
        }
        return as_json(self.describe() | more)

    def load(self) -> dict[str, int]:
        """Return its requests, and how many can run at a time."""
        decoder, waiting = self.engine.decoder, len(self.engine.waiting)
        return {"running": len(decoder.running), "waiting": waiting, "capacity": decoder.max_rows}

    async def _loads(self, request: web.Request) -> web.Response:
        now = self.load()
        load = {
            "dp_rank": 0,
            "num_running_reqs": now["running"],
            "num_waiting_reqs": now["waiting"],
            "max_running_requests": now["capacity"],
        }
        version = f"arealite-{arealite.__version__}"
        return as_json({"timestamp": time.time(), "version": version, "loads": [load]})

    async def _models(self, request: web.Request) -> web.Response:
        path, length = self.model.weights, self.model.context_length
        model = {"id": path, "object": "model", "created": self._started, "owned_by": "arealite"}
        model |= {"root": path, "parent": None, "max_model_len": length}
        return as_json({"object": "list", "data": [model]})

    async def _openapi(self, request: web.Request) -> web.Response:
        routes = request.app.router.routes()
        told = protocol.openapi((r.method, r.resource.canonical) for r in routes if r.resource)
        return as_json(told)


@web.middleware
async def _refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return as_error(400, str(refusal))
