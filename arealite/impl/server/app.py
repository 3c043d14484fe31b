"""The HTTP side of the embedded server: SGLang's routes over an engine.

In the event loop's thread, which never computes: it parses, waits for the engine and answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

import arealite
from arealite.base import log
from arealite.impl.server import protocol
from arealite.impl.server.engine import Engine
from arealite.impl.server.generation import Generation
from arealite.impl.server.protocol import Limits, Refusal
from arealite.impl.server.weights import StagedWeights, live_tensors

logger = log.get(__name__)

MAX_BODY = 64 * 2**20
encode = msgspec.json.Encoder().encode


@dataclass
class Identity:
    """What the server says about its model."""

    model_path: str
    tokenizer_path: str
    model_type: str
    architectures: list[str]


class App:
    """Routes and their handlers."""

    def __init__(self, engine: Engine, limits: Limits, identity: Identity) -> None:
        self.engine = engine
        self.limits = limits
        self.identity = identity
        self.tensors = live_tensors(engine.decoder.model)
        self.started = time.time()

    def make(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_refusals])
        for path, post in {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/flush_cache": self.flush_cache,
        }.items():
            app.router.add_post(path, post)
        for path, get in {
            "/health": self.health,
            "/ping": self.health,
            "/ready": self.ready,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/v1/loads": self.loads,
            "/v1/models": self.models,
        }.items():
            app.router.add_get(path, get)
        return app

    # ------------------------------------------------------------ generation

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate."""
        raw = await request.read()
        try:
            body = protocol.parse(raw, protocol.GenerateBody)
            generations, is_list = protocol.generations_of(body, self.limits)
        except Refusal as refusal:
            if protocol.wants_stream(raw):
                return await self._refuse_stream(request, str(refusal))
            raise
        if body.stream:
            return await self._stream(request, generations[0], logprobs=body.return_logprob)
        await self._finished(generations)
        for generation in generations:
            if generation.error is not None:
                return error_response(500, generation.error)
        answers = [self._answer(g, logprobs=body.return_logprob) for g in generations]
        return json_response(answers if is_list else answers[0])

    def _answer(self, generation: Generation, *, logprobs: bool) -> dict[str, Any]:
        return protocol.answer(
            generation, version=self.engine.version, logprobs=logprobs, limits=self.limits
        )

    async def _finished(self, generations: Sequence[Generation]) -> None:
        """Submit generations and wait for all; a client that goes away takes them with it."""
        done = asyncio.get_running_loop().create_future()
        left = len(generations)

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if left == 0 and not done.done():
                done.set_result(None)

        for generation in generations:
            generation.notify = one_ended
        self.engine.submit(generations)
        try:
            await done
        except asyncio.CancelledError:
            self.engine.abort_these(generations)
            raise

    async def _stream(
        self, request: web.Request, generation: Generation, *, logprobs: bool
    ) -> web.StreamResponse:
        progress = asyncio.Event()
        generation.notify = progress.set
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.engine.submit([generation])
        try:
            ended = False
            while not ended:
                await progress.wait()
                progress.clear()
                event: Any = self._answer(generation, logprobs=logprobs)
                ended = event["meta_info"]["finish_reason"] is not None
                if generation.error is not None:
                    event, ended = _error_event(500, generation.error), True
                await response.write(b"data: " + encode(event) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.engine.abort_these([generation])
            raise
        return response

    async def _refuse_stream(self, request: web.Request, text: str) -> web.StreamResponse:
        event = encode(_error_event(400, text))
        body = b"data: " + event + b"\n\ndata: [DONE]\n\n"
        return web.Response(body=body, content_type="text/event-stream")

    async def abort_request(self, request: web.Request) -> web.Response:
        """POST /abort_request: 200 also for an unknown id."""
        body = protocol.parse(await request.read(), protocol.AbortBody)
        if body.abort_all or body.rid:
            self.engine.abort(None if body.abort_all else body.rid)
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        """POST /pause_generation."""
        body = protocol.parse(await request.read(), protocol.PauseBody)
        if body.mode not in ("abort", "retract", "in_place"):
            raise Refusal(f"mode must be abort, retract or in_place, got {body.mode!r}.")
        await asyncio.wrap_future(self.engine.pause(body.mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """POST /continue_generation."""
        protocol.parse(await request.read(), protocol.EmptyBody)
        await asyncio.wrap_future(self.engine.resume())
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    # ------------------------------------------------------------ weights

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """POST /update_weights_from_disk."""
        body = protocol.parse(await request.read(), protocol.UpdateBody)
        if body.load_format not in (None, "auto", "safetensors"):
            raise Refusal(f"load_format must be auto or safetensors, got {body.load_format!r}.")
        update = self.engine.update(
            lambda: StagedWeights(self.tensors, body.model_path).load,
            version=body.weight_version,
            flush=body.flush_cache,
            abort_all=body.abort_all_requests,
        )
        try:
            clean = await asyncio.wrap_future(update)
        except Refusal as refusal:
            return _update_response(400, str(refusal))
        self.identity.model_path = body.model_path
        logger.info("weights updated", version=self.engine.version, path=body.model_path)
        if not clean:
            return _update_response(
                400,
                "Weights were updated, but the cache was not flushed because requests are still "
                "running or queued. Retract or finish them, then call /flush_cache.",
            )
        text = "Succeeded to update model weights."
        if body.weight_version is not None:
            text += f" Weight version updated to {body.weight_version}."
        return _update_response(200, text)

    async def flush_cache(self, request: web.Request) -> web.Response:
        """POST /flush_cache: 400 while requests run."""
        flushed = await asyncio.wrap_future(self.engine.flush())
        if not flushed:
            return web.Response(status=400, text="Flush cache failed.\n")
        return web.Response(text="Cache flushed.\n")

    # ------------------------------------------------------------ information

    async def health(self, request: web.Request) -> web.Response:
        """GET /health and /ping: 200, empty."""
        return web.Response()

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: 503 while paused."""
        return web.Response(status=503 if self.engine.paused else 200)

    def describe(self) -> dict[str, Any]:
        """Return what /model_info says."""
        return {
            "model_path": self.identity.model_path,
            "served_model_name": self.identity.model_path,
            "tokenizer_path": self.identity.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.engine.version,
            "load_format": "auto",
            "model_type": self.identity.model_type,
            "architectures": self.identity.architectures,
            "vocab_size": self.limits.vocab_size,
            "context_length": self.limits.context_length,
        }

    async def model_info(self, request: web.Request) -> web.Response:
        """GET /model_info."""
        return json_response(self.describe())

    async def server_info(self, request: web.Request) -> web.Response:
        """GET /server_info: the model, and the engine's counters."""
        more = {"status": "ready", "version": arealite.__version__, "backend": "arealite-embedded"}
        return json_response(self.describe() | more | {"internal_states": [self.engine.stats]})

    async def loads(self, request: web.Request) -> web.Response:
        """GET /v1/loads."""
        engine = self.engine
        running, waiting = len(engine.decoder.running), len(engine.waiting)
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "max_running_requests": engine.decoder.max_rows,
            "queues": {"waiting": waiting},
        }
        version = f"arealite-{arealite.__version__}"
        return json_response({"timestamp": time.time(), "version": version, "loads": [load]})

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        path = self.identity.model_path
        model = {
            "id": path,
            "object": "model",
            "created": int(self.started),
            "owned_by": "arealite",
            "root": path,
            "parent": None,
            "max_model_len": self.limits.context_length,
        }
        return json_response({"object": "list", "data": [model]})


def json_response(value: Any, status: int = 200) -> web.Response:
    """Return `value` as JSON."""
    return web.Response(body=encode(value), status=status, content_type="application/json")


def error_response(status: int, text: str) -> web.Response:
    """Return SGLang's error object."""
    return json_response({"error": {"message": text}}, status)


def _error_event(code: int, text: str) -> dict[str, Any]:
    kind = "invalid_request_error" if code == 400 else "internal_server_error"
    return {"error": {"message": text, "type": kind, "code": code, "retryable": code != 400}}


def _update_response(status: int, text: str) -> web.Response:
    answer = {"success": status == 200, "message": text, "num_paused_requests": 0}
    return json_response(answer, status)


@web.middleware
async def _refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return error_response(400, str(refusal))
