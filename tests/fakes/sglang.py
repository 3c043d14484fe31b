"""A scripted server that speaks SGLang's native protocol, for tests that need no model.

Everything is deterministic: the next token is a function of the tokens before it, delays are set by
the test (`latency_s`, `token_s`), and generations can be blocked at a token until the test releases
them. Faults are queued per path.

    async with FakeSGLang() as server:
        server.hold_after = 3                       # every generation blocks after 3 tokens
        ...                                         # send requests to server.url
        await server.held(1)                        # one generation is blocked
        server.fail_next("500")                     # the next /generate is answered 500
        server.release()
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from tests.fakes.ports import held_port
from tests.fakes.sglang_weights import WeightRoutes

BODY = web.RequestKey("body", dict)
ABORT = web.RequestKey("abort", bool)
KINDS = ("400", "500", "reset", "hang", "die", "abort")


def next_letter(tokens: list[int]) -> int:
    """Return the default model's next token: deterministic, never below 3, never above 258."""
    return 3 + (tokens[-1] * 7 + len(tokens)) % 256


@dataclass(eq=False)
class Job:
    """One generation in the fake."""

    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    output: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    abort_message: str | None = None
    retractions: int = 0


class FakeSGLang:
    """One fake server on a loopback port, living in the test's event loop."""

    disjoint = False
    """True: as with --incremental-streaming-output, an event has only its new tokens."""

    def __init__(self, *, next_token: Callable[[list[int]], int] = next_letter, **settings: Any):
        self.next_token = next_token
        self.vocab_size = 320
        self.context_length = 2048
        self.eos_token_id: int | None = None
        self.latency_s: float | Callable[[dict[str, Any]], float] = 0.0
        """Seconds before the first token: a number, or a function of the request's body."""
        self.token_s = 0.0
        self.capacity = 64
        """Reported maximum of running requests; further requests are reported as waiting."""
        self.hold_after: int | None = None
        """Generations block after this many tokens until `release`."""
        self.spans = True
        """False: like SGLang before 0.5.19, no per-token versions."""
        self.sessions = True
        """False: like SGLang before 0.5.21, no begin_weight_update and end_weight_update."""
        self.stubborn = 0
        """Number of further calls of /continue_generation that are ignored."""
        self.api_key = ""
        """The bearer token that requests need; "" for none."""
        self.tells_pause = True
        """False: like SGLang 0.5.9, no /ready."""
        self.pause_modes = ("abort", "retract", "in_place")
        self.buckets = True
        """False: distributed updates refuse flattened_bucket."""
        self.checksum: str | None = ""
        """"": checksum of the weights; other text: this wrong checksum; None: no route."""
        self.version = "default"
        self.model_path = "fake-model"
        self.requests: list[dict[str, Any]] = []
        """Bodies of all /generate calls."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """(path, body) of every POST."""
        self.paused: str | None = None
        self.on_hang: Callable[[], None] = lambda: None
        """Called when a request begins to hang, as a fault."""
        self.port = 0
        for name, value in settings.items():
            if not hasattr(self, name):
                raise TypeError(f"FakeSGLang has no setting {name}")
            setattr(self, name, value)
        self._jobs: dict[str, Job] = {}
        self._ids = itertools.count()
        self._faults: defaultdict[str, deque[str]] = defaultdict(deque)
        self._changed = asyncio.Condition()
        self._updating = False
        self.asked_ready = asyncio.Event()
        """Set when /ready is requested."""
        self._reported: str | None = None
        """The version in /model_info if it differs from `version` (update without a flush)."""
        self.weights = WeightRoutes(self)
        self._runner: web.AppRunner | None = None

    # ------------------------------------------------------------ for tests

    @property
    def url(self) -> str:
        """The base address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_up(self) -> bool:
        """Whether the fake listens."""
        return self._runner is not None

    @property
    def running(self) -> int:
        """Generations not yet answered."""
        return len(self._jobs)

    @property
    def reported(self) -> str:
        """The version in /model_info."""
        return self.version if self._reported is None else self._reported

    def entry(self) -> dict[str, Any]:
        """Return the value under which the fake stands in the name registry (role llm_server)."""
        return {
            "address": self.url,
            "type": "fake",
            "model_path": self.model_path,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "version": self.reported,
            "load": self.load(),
            "host": "127.0.0.1",
            "pid": 0,
        }

    def load(self) -> dict[str, int]:
        """Return the load as in the registry entry of a server."""
        running = min(len(self._jobs), self.capacity)
        waiting = len(self._jobs) - running
        return {"running": running, "waiting": waiting, "capacity": self.capacity}

    def recover(self) -> None:
        """Remove all queued faults."""
        self._faults.clear()

    def fail_next(self, kind: str, *, count: int = 1, path: str = "/generate") -> None:
        """Queue a fault (400 500 reset hang die abort) for the next `count` calls of `path`."""
        if kind not in KINDS:
            raise ValueError(f"unknown fault {kind}; known: {', '.join(KINDS)}")
        self._faults[path].extend([kind] * count)

    def release(self) -> None:
        """Continue all blocked generations."""
        self.hold_after = None
        self._tasks.create_task(self._notify())

    async def received(self, count: int, *, seconds: float = 60.0) -> None:
        """Wait until `count` /generate calls have arrived."""
        await self._until(lambda: len(self.requests) >= count, seconds)

    async def held(self, count: int, *, seconds: float = 60.0) -> None:
        """Wait until `count` generations are blocked at `hold_after`."""
        await self._until(lambda: sum(map(self._is_held, self._jobs.values())) >= count, seconds)

    async def kill(self) -> None:
        """Simulate a crash: connections are reset, and the port refuses connections."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        if runner.server is not None:
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await runner.cleanup()
        self._jobs.clear()

    async def restart(self) -> None:
        """Restart on the same port with the initial version."""
        await self.kill()
        self.version, self.paused, self._updating = "default", None, False
        self._reported = None
        self.weights.forget()
        await self._start()

    async def __aenter__(self) -> FakeSGLang:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._held = ExitStack()
        self.port = self._held.enter_context(held_port())
        await self._start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()
        await self._tasks.__aexit__(None, None, None)
        self._held.close()

    # ------------------------------------------------------------ inside

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._faulty], client_max_size=64 * 2**20)
        own = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
        }
        for path, handler in (own | self.weights.handlers()).items():
            app.router.add_post(path, handler)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/openapi.json", self._openapi)
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self._info)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.02, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool], seconds: float = 3600.0) -> None:
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(condition)

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "")
        if self.api_key and sent != f"Bearer {self.api_key}" and request.path != "/health":
            return web.json_response({"error": "Unauthorized"}, status=401)
        raw = await request.read() if request.method == "POST" else b""
        try:
            body = msgspec.json.decode(raw or b"{}")
        except msgspec.DecodeError as error:
            return _error(400, str(error))
        if request.method == "POST":
            self.calls.append((request.path, body))
            if request.path == "/generate":
                self.requests.append(body)
            await self._notify()
        request[BODY] = body
        faults = self._faults[request.path]
        kind = faults.popleft() if faults else ""
        if kind in ("400", "500"):
            return _error(int(kind), f"scripted {kind}")
        if kind == "hang":
            self.on_hang()
            await asyncio.Event().wait()
        if kind == "reset" and request.transport is not None:
            request.transport.abort()
        if kind == "die":
            self._tasks.create_task(self.kill())
            await asyncio.Event().wait()
        request[ABORT] = kind == "abort"
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        self.asked_ready.set()
        if not self.tells_pause:
            return web.Response(status=404)
        return web.Response(status=503 if self.paused else 200)

    async def _info(self, request: web.Request) -> web.Response:
        extra = {"is_generation": True, "weight_version": self.reported, "status": "ready"}
        return _json(self.entry() | extra | {"tp_size": 1, "dp_size": 1, "dtype": "float32"})

    async def _loads(self, request: web.Request) -> web.Response:
        now = self.load()
        load = {"num_running_reqs": now["running"], "num_waiting_reqs": now["waiting"]}
        load |= {"dp_rank": 0, "max_running_requests": self.capacity}
        return _json({"version": "0.5.23", "loads": [load]})

    async def _openapi(self, request: web.Request) -> web.Response:
        own = ["/generate", "/abort_request", "/pause_generation", "/continue_generation"]
        return _json(self.weights.openapi(own))

    def _refusal(self, body: dict[str, Any]) -> str | None:
        prompts = body.get("input_ids")
        if not isinstance(prompts, list) or not prompts:
            return "Either text, input_ids or input_embeds should be provided."
        sampling = body.get("sampling_params") or {}
        for prompt in prompts if isinstance(prompts[0], list) else [prompts]:
            length, new = len(prompt), sampling.get("max_new_tokens", 128)
            if length >= self.context_length:
                return (
                    f"The input ({length} tokens) is longer than the model's context length "
                    f"({self.context_length} tokens)."
                )
            if length + new > self.context_length:
                return (
                    "Requested token count exceeds the model's maximum context length of "
                    f"{self.context_length} tokens."
                )
            if not all(0 <= token < self.vocab_size for token in prompt):
                return f"input_ids must lie in [0, {self.vocab_size})."
        if sampling.get("temperature", 1.0) < 0:
            temperature = sampling["temperature"]
            return f"temperature must be a non-negative finite number, got {temperature}."
        return None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = request[BODY]
        if refusal := self._refusal(body):
            return _error(400, refusal)
        latency = self.latency_s(body) if callable(self.latency_s) else self.latency_s
        if latency:
            await asyncio.sleep(latency)
        job = self._job(body, body["input_ids"])
        if request[ABORT]:
            job.abort_message = "Aborted"
        try:
            if body.get("stream"):
                return await self._stream(request, job)
            return _json(await self._last(job))
        finally:
            self._jobs.pop(job.rid, None)
            await self._notify()

    def _job(self, body: dict[str, Any], prompt: list[int]) -> Job:
        rid = body.get("rid") if isinstance(body.get("rid"), str) else None
        job = Job(rid or f"fake-{next(self._ids)}", prompt, body.get("sampling_params") or {})
        if job.rid in self._jobs:
            job.rid += f"-{next(self._ids)}"
        return job

    async def _last(self, job: Job) -> dict[str, Any]:
        async for _ in self._tokens(job):
            pass
        return self._answer(job)

    async def _stream(self, request: web.Request, job: Job) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        async for _ in self._tokens(job):
            answer = self._answer(job)
            if self.disjoint:
                for place, key in (
                    (answer, "text"),
                    (answer, "output_ids"),
                    (answer["meta_info"], "output_token_logprobs"),
                ):
                    place[key] = place[key][sent:]
                sent = len(job.output)
            await response.write(b"data: " + msgspec.json.encode(answer) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _tokens(self, job: Job) -> AsyncIterator[None]:
        """Generate, yielding after every token and at the end."""
        await self._until(lambda: not self._updating)
        self._jobs[job.rid] = job
        await self._notify()
        budget = job.sampling.get("max_new_tokens", 128)
        while job.finish is None:
            if self.token_s:
                await asyncio.sleep(self.token_s)
            if not self._may_run(job):
                await self._notify()
                await self._until(lambda: self._may_run(job))
            if job.abort_message is not None:
                job.finish = {"type": "abort", "message": job.abort_message}
            elif len(job.output) >= budget:
                job.finish = {"type": "length", "length": budget}
            else:
                job.output.append(self.next_token(job.prompt + job.output))
                job.versions.append(self.version)
                job.finish = self._finish(job, budget)
            yield

    def _finish(self, job: Job, budget: int) -> dict[str, Any] | None:
        stops = {self.eos_token_id, *(job.sampling.get("stop_token_ids") or [])}
        if job.sampling.get("ignore_eos"):
            stops = set()
        allowed = len(job.output) > job.sampling.get("min_new_tokens", 0)
        if job.output[-1] in stops and allowed:
            return {"type": "stop", "matched": job.output[-1]}
        if len(job.output) >= budget:
            return {"type": "length", "length": budget}
        return None

    def _is_held(self, job: Job) -> bool:
        return self.hold_after is not None and len(job.output) >= self.hold_after

    def _may_run(self, job: Job) -> bool:
        if job.abort_message is not None and self.paused != "in_place":
            return True
        return self.paused is None and not self._is_held(job)

    def logprob(self, token: int) -> float:
        """Return the fake's log-probability of a token."""
        return -0.125 * (1 + token % 8)

    def _answer(self, job: Job) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": job.finish,
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(job.output),
            "cached_tokens": 0,
            "weight_version": self.version,
            "num_retractions" if self.spans else "total_retractions": job.retractions,
            "output_token_logprobs": [[self.logprob(t), t, None] for t in job.output],
        }
        if self.spans and job.finish is not None:
            meta["weight_versions"] = _spans(job.versions)
        text = "".join(chr(token) for token in job.output)
        return {"text": text, "output_ids": list(job.output), "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        body = request[BODY]
        for job in self._jobs.values():
            if body.get("abort_all") or job.rid.startswith(body.get("rid") or "\0"):
                job.abort_message = "Aborted"
        await self._notify()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request[BODY].get("mode", "abort")
        if mode not in self.pause_modes:
            return _error(400, f"Invalid pause mode {mode!r}")
        self.paused = mode
        running = list(self._jobs.values())
        for job in running:
            if mode == "abort":
                job.abort_message = "Aborted"
            job.retractions += mode == "retract"
        await self._notify()
        if mode == "abort":  # later requests are paused and not waited for
            await self._until(lambda: all(job not in self._jobs.values() for job in running))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self.stubborn, stays = max(0, self.stubborn - 1), self.stubborn > 0
        self.paused = self.paused if stays else None
        await self._notify()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    # ------------------------------------------------------------ for the weight routes

    def body_of(self, request: web.Request) -> dict[str, Any]:
        """Return the decoded body."""
        return request[BODY]

    async def still(self) -> None:
        """Wait until no request runs, unless paused; new generations wait."""
        if self.paused is None:
            self._updating = True
            await self._until(lambda: not self._jobs)
            self._updating = False
            await self._notify()

    async def change(self, body: dict[str, Any]) -> bool:
        """Load new weights when no request runs; return False if the cache could not be flushed."""
        if body.get("abort_all_requests"):
            await self._abort_all()
        await self.still()
        old, version = self.reported, body.get("weight_version")
        self.version = self.version if version is None else version
        dirty = bool(self.paused == "in_place" and self._jobs and body.get("flush_cache", True))
        self._reported = old if dirty else None
        return not dirty

    async def relabel(self, version: str, *, abort: bool) -> None:
        """Change the reported version."""
        if abort:
            await self._abort_all()
        self.version, self._reported = version, None

    async def _abort_all(self) -> None:
        for job in self._jobs.values():
            job.abort_message = "Aborted"
        await self._notify()

    async def _flush(self, request: web.Request) -> web.Response:
        busy = self._jobs and self.paused != "retract"
        return web.Response(text="Cache flushed.\n", status=400 if busy else 200)


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": version, "start": position, "end": position + 1})
    return spans


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message}}, status)
