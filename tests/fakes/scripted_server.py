"""A scripted LLM server for tests that need no model; a subclass has the routes of one kind.

Everything is deterministic: the next token is a function of the tokens before it, delays are set by
the test (`token_s`), and generations can be blocked at a token until the test releases them. Faults
are queued per path.

    async with FakeSGLang() as server:              # or FakeVLLM
        server.hold_after = 3                       # every generation blocks after 3 tokens
        ...                                         # send requests to server.url
        await server.held(1)                        # one generation is blocked
        server.fail_next("500")                     # the next request for tokens is answered 500
        server.release()
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
from aiohttp import web

from tests.fakes.ports import held_port
from tests.fakes.scores import Weights, next_scores, prompt_scores, weights_of
from tests.fakes.weight_faults import WeightFault, loads

if TYPE_CHECKING:
    from tests.fakes.adapters import SGLangAdapters, VLLMAdapters

BODY = web.RequestKey("body", dict)
ABORT = web.RequestKey("abort", bool)
KINDS = ("400", "500", "reset", "hang", "die", "abort")
Handler = Callable[[web.Request], Any]


def next_letter(tokens: list[int]) -> int:
    """Return the default model's next token: deterministic, never below 3, never above 258."""
    return 3 + (tokens[-1] * 7 + len(tokens)) % 256


@dataclass(kw_only=True)
class SentRequest:
    """A request for tokens, in one form for all kinds of servers."""

    rid: str
    """"" if the request has no id."""
    input_ids: Any
    sampling: dict[str, Any]
    """Sampling parameters by their names in `SamplingConfig`."""
    is_stream: bool
    scores_prompt: bool = False
    """Whether the log-probabilities of the prompt are wanted."""
    adapter: str = ""
    """The adapter that it names."""


@dataclass(eq=False, kw_only=True)
class Job:
    """One generation in the fake."""

    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    budget: int
    adapter: str = ""
    key: str = ""
    """Differs from `rid` if another generation has the same id."""
    output: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: str | None = None
    """ "stop", "length" or "abort"; None before the end."""
    matched: int | None = None
    """The stop token that ended the generation."""
    abort_message: str | None = None
    retractions: int = 0

    def spans(self) -> list[dict[str, Any]]:
        """Return the versions of the tokens, as servers report them."""
        spans: list[dict[str, Any]] = []
        for position, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": version, "start": position, "end": position + 1})
        return spans


class ScriptedServer(ABC):
    """One fake server on a loopback port, living in the test's event loop."""

    generate_path: str
    pause_path: str
    load_path: str
    """Loads weights from a folder."""
    continue_path: str
    relabel_path: str
    first_load_path: str
    """First request of an update of weights from a folder, after the pause."""
    probe_paths: tuple[str, ...]
    """Requests with which a publisher begins."""
    scores = False
    """True: answers have log-probabilities of prompts, those of `tests/fakes/scores.py`."""

    def __init__(self, *, next_token: Callable[[list[int]], int] = next_letter, **settings: Any):
        self.next_token = next_token
        self.vocab_size = 320
        self.context_length = 2048
        self.eos_token_id: int | None = None
        self.token_s = 0.0
        self.capacity = 64
        """Reported maximum of running requests; further requests are reported as waiting."""
        self.hold_after: int | None = None
        """Generations block after this many tokens until `release`."""
        self.stubborn = 0
        """Number of further requests to continue that are ignored."""
        self.weights_after: WeightFault = loads
        """Returns the weights after an update."""
        self.keeps_prefixes = False
        """True: updates leave the cached prefixes of the weights before."""
        self._loaded = "default"
        """The version that it loaded last."""
        self._weights = weights_of(self._loaded)
        self._prefixes = dict[tuple[int, ...], Weights]()
        """The weights with which each cached prompt was computed."""
        self.api_key = ""
        """The bearer token that requests need; "" for none."""
        self.version = "default"
        self.model_path = "fake-model"
        self.requests: list[SentRequest] = []
        """All requests for tokens."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """(path, body and query) of every POST."""
        self.abort_rids: list[str] = []
        """Ids of the requests that clients aborted."""
        self.paused: str | None = None
        """The pause mode: abort, retract or in_place."""
        self.on_hang: Callable[[], None] = lambda: None
        """Called when a request begins to hang, as a fault."""
        self.port = 0
        self.set_up()
        for name, value in settings.items():
            if not hasattr(self, name):
                raise TypeError(f"{type(self).__name__} has no setting {name}")
            setattr(self, name, value)
        self.asked_pause = asyncio.Event()
        """Set when a client asks whether the server is paused."""
        self._jobs: dict[str, Job] = {}
        self._ids = itertools.count()
        self._faults: defaultdict[str, deque[str]] = defaultdict(deque)
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        """Held during a start and an end."""
        self.num_starts = 0

    # ------------------------------------------------------------ one kind of server

    @abstractmethod
    def set_up(self) -> None:
        """Set the defaults of settings that only this kind has."""

    @abstractmethod
    def posts(self) -> dict[str, Handler]:
        """Return the handler of each POST route."""

    @abstractmethod
    def gets(self) -> dict[str, Handler]:
        """Return the handler of each GET route."""

    @abstractmethod
    def read_request(self, body: dict[str, Any]) -> SentRequest:
        """Return a request for tokens in the form of `requests`."""

    @abstractmethod
    def refusal(self, sent: SentRequest) -> str | None:
        """Return why a request is answered 400; None if it is valid."""

    @abstractmethod
    def budget(self, sent: SentRequest) -> int:
        """Return the number of tokens after which a generation ends."""

    @abstractmethod
    def whole_answer(self, job: Job) -> dict[str, Any]:
        """Return the whole answer of a generation."""

    @abstractmethod
    def event(self, job: Job, num_sent: int) -> dict[str, Any]:
        """Return an event of a stream; earlier events had `num_sent` tokens."""

    @abstractmethod
    async def update_weights(self, version: str, *, keep_cache: bool = False) -> None:
        """Load other weights, as a request of a publisher does."""

    @abstractmethod
    def forget(self) -> None:
        """Reset the state of weights, as a restart does."""

    @abstractmethod
    def add_scores(
        self, answer: dict[str, Any], ids: list[int], scores: list[float], top: list[float]
    ) -> None:
        """Add the scores of a prompt to an answer.

        Args:
            answer: The whole answer.
            ids: The prompt.
            scores: The log-probability of each token but the first one.
            top: Those of the most probable tokens at the last place.
        """

    @abstractmethod
    def set_next(self, answer: dict[str, Any], top: list[float]) -> None:
        """Set the log-probabilities of the most probable first tokens of an answer."""

    def route_of(self, path: str, body: dict[str, Any]) -> str:
        """Return the name of a request in `calls` and for `fail_next`."""
        return path

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
    @abstractmethod
    def adapters(self) -> SGLangAdapters | VLLMAdapters:
        """Its adapters."""

    @property
    def weights_held(self) -> Weights:
        """The weights that it really has."""
        if self._loaded != self.version:
            self._weights = self.weights_after(self._weights, self.version)
            self._loaded = self.version
        return self._weights

    @property
    def running(self) -> int:
        """Generations not yet answered."""
        return len(self._jobs)

    @property
    def reported(self) -> str:
        """The version that the server reports."""
        return self.version

    def entry(self) -> dict[str, Any]:
        """Return the value under which the fake stands in the name registry (role llm_server)."""
        adapters = {"adapters": {}} if self.adapters.max_rank else {}
        return adapters | {
            "address": self.url,
            "type": "fake",
            "model_path": self.model_path,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "version": self.reported,
            "dtype": "float32",
            "load": self.load(),
            "host": "127.0.0.1",
            "pid": 0,
        }

    def load(self) -> dict[str, int]:
        """Return the load as in the registry entry of a server."""
        running = min(len(self._jobs), self.capacity)
        waiting = len(self._jobs) - running
        return {"running": running, "waiting": waiting, "capacity": self.capacity}

    def logprob(self, token: int) -> float:
        """Return the fake's log-probability of a token."""
        return -0.125 * (1 + token % 8)

    def logged(self, ids: list[int]) -> list[int]:
        """Return the tokens of an answer whose log-probabilities are in it; a test replaces it."""
        return ids

    def recover(self) -> None:
        """Remove all queued faults."""
        self._faults.clear()

    def fail_next(self, kind: str, *, count: int = 1, path: str = "") -> None:
        """Queue a fault for the next requests of a path.

        Args:
            kind: 400, 500, reset, hang, die or abort.
            count: Number of requests.
            path: The path; "" for requests for tokens.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown fault {kind}; known: {', '.join(KINDS)}")
        self._faults[path or self.generate_path].extend([kind] * count)

    def release(self) -> None:
        """Continue all blocked generations."""
        self.hold_after = None
        self._tasks.create_task(self._notify())

    async def received(self, count: int, *, seconds: float = 60.0) -> None:
        """Wait until `count` requests for tokens have arrived."""
        await self._until(lambda: len(self.requests) >= count, seconds)

    async def held(self, count: int, *, seconds: float = 60.0) -> None:
        """Wait until `count` generations are blocked at `hold_after`."""
        await self._until(lambda: sum(map(self._is_held, self._jobs.values())) >= count, seconds)

    async def pause(self, mode: str) -> None:
        """Pause all generations, as a publisher does."""
        self.paused = mode
        running = list(self._jobs.values())
        for job in running:
            if mode == "abort":
                job.abort_message = "Aborted"
            job.retractions += mode == "retract"
        await self._notify()
        if mode == "abort":  # later requests are paused and not waited for
            await self._until(lambda: all(job not in self._jobs.values() for job in running))

    async def resume(self) -> None:
        """Continue after a pause, unless the server is stubborn."""
        stays_paused = self.stubborn > 0
        self.stubborn = max(0, self.stubborn - 1)
        if not stays_paused:
            self.paused = None
        await self._notify()

    async def push(self, version: str, mode: str) -> None:
        """Update the weights during a pause, and release blocked generations."""
        await self.pause(mode)
        await self.update_weights(version, keep_cache=mode == "in_place")
        self.hold_after = None
        await self.resume()

    async def abort_all(self) -> None:
        """Abort all generations."""
        for job in self._jobs.values():
            job.abort_message = "Aborted"
        await self._notify()

    async def kill(self) -> None:
        """Simulate a crash: connections are reset, and the port refuses connections."""
        async with self._starting:
            await self._stop()

    async def kill_start(self, number: int) -> None:
        """Simulate a crash, unless the server was restarted since its start with this number."""
        async with self._starting:
            if self.num_starts == number:
                await self._stop()

    async def restart(self) -> None:
        """Restart on the same port with the initial version."""
        async with self._starting:
            await self._stop()
            self.version = "default"
            self.paused = None
            self.forget()
            self.adapters.forget()
            await self._start()

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._held = ExitStack()
        self.port = self._held.enter_context(held_port())
        await self._start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()
        await self._tasks.__aexit__(None, None, None)
        self._held.close()

    # ------------------------------------------------------------ requests and faults

    async def _start(self) -> None:
        self.num_starts += 1
        app = web.Application(middlewares=[self._faulty], client_max_size=64 * 2**20)
        app.router.add_post(self.generate_path, self._generate)
        for path, handler in self.posts().items():
            app.router.add_post(path, handler)
        app.router.add_get("/health", self._health)
        for path, handler in self.gets().items():
            app.router.add_get(path, handler)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.02, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        server = runner.server
        assert server is not None
        await _stop_accepting(runner)
        for site in list(runner.sites):
            await site.stop()
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
        self._jobs.clear()

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
            return json_answer({"error": "Unauthorized"}, 401)
        raw = await request.read() if request.method == "POST" else b""
        try:
            body = msgspec.json.decode(raw or b"{}") | dict(request.query)
        except msgspec.DecodeError as error:
            return error_answer(400, str(error))
        route = self.route_of(request.path, body)
        if request.method == "POST":
            self.calls.append((route, body))
            if request.path == self.generate_path:
                self.requests.append(self.read_request(body))
            await self._notify()
        request[BODY] = body
        faults = self._faults[route]
        kind = faults.popleft() if faults else ""
        if kind:
            self.suffer(kind, route)
        if kind in ("400", "500"):
            return error_answer(int(kind), f"scripted {kind}")
        if kind == "hang":
            self.on_hang()
            await asyncio.Event().wait()
        if kind == "reset" and request.transport is not None:
            request.transport.abort()
        if kind == "die":
            await self.die()
        request[ABORT] = kind == "abort"
        return await handler(request)

    def suffer(self, kind: str, route: str) -> None:  # noqa: B027  (most faults change nothing)
        """Change the state as a fault of a request does."""

    async def die(self) -> None:
        """Kill the fake from a request; never returns."""
        self._tasks.create_task(self.kill_start(self.num_starts))
        await asyncio.Event().wait()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    # ------------------------------------------------------------ generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        sent = self.read_request(request[BODY])
        refusal = self.refusal(sent)
        if refusal:
            return error_answer(400, refusal)
        missing = await self.adapters.lacks(sent.adapter) if sent.adapter else None
        if missing is not None:
            return missing
        job = self._new_job(sent)
        if request[ABORT]:
            job.abort_message = "Aborted"
        try:
            if sent.is_stream:
                return await self._stream(request, job)
            async for _ in self.tokens(job):
                pass
            answer = self.whole_answer(job)
            if sent.scores_prompt and self.scores:
                scores = prompt_scores(self.weights_held, job.prompt)
                top = next_scores(self.weights_held, job.prompt[:-1])
                self.add_scores(answer, job.prompt, scores, top)
            elif job.sampling.get("temperature") == 0 and job.budget == 1 and job.output:
                self.set_next(answer, next_scores(self._prefix_weights(job.prompt), job.prompt))
            return json_answer(answer)
        finally:
            self._jobs.pop(job.key, None)
            await self._notify()

    def _prefix_weights(self, prompt: list[int]) -> Weights:
        """Return the weights with which a prompt is computed, which are perhaps cached ones."""
        weights = self.weights_held
        if not self.keeps_prefixes:
            self._prefixes.clear()
        return self._prefixes.setdefault(tuple(prompt), weights)

    def _new_job(self, sent: SentRequest) -> Job:
        rid = sent.rid or f"fake-{next(self._ids)}"
        key = rid
        if key in self._jobs:
            key += f"-{next(self._ids)}"
        return Job(
            rid=rid,
            prompt=sent.input_ids,
            sampling=sent.sampling,
            budget=self.budget(sent),
            adapter=sent.adapter,
            key=key,
        )

    async def _stream(self, request: web.Request, job: Job) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_sent = 0
        async for _ in self.tokens(job):
            event = self.event(job, num_sent)
            num_sent = len(job.output)
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def tokens(self, job: Job) -> AsyncIterator[None]:
        """Generate, yielding after every token and at the end."""
        self._jobs[job.key] = job
        await self._notify()
        while job.finish is None:
            if self.token_s:
                await asyncio.sleep(self.token_s)
            if not self._may_run(job):
                await self._notify()
                await self._until(lambda: self._may_run(job))
            if job.abort_message is not None:
                job.finish = "abort"
            elif len(job.output) >= job.budget:
                job.finish = "length"
            else:
                job.output.append(await self.sample(job))
                job.versions.append(self.version)
                job.finish = self._finish(job)
            yield

    async def sample(self, job: Job) -> int:
        """Return the next token."""
        return self.next_token(job.prompt + job.output)

    def _finish(self, job: Job) -> str | None:
        stops = {self.eos_token_id, *(job.sampling.get("stop_token_ids") or [])}
        if job.sampling.get("ignore_eos"):
            stops = set()
        may_stop = len(job.output) > job.sampling.get("min_new_tokens", 0)
        if job.output[-1] in stops and may_stop:
            job.matched = job.output[-1]
            return "stop"
        return "length" if len(job.output) >= job.budget else None

    def _is_held(self, job: Job) -> bool:
        return self.hold_after is not None and len(job.output) >= self.hold_after

    def _may_run(self, job: Job) -> bool:
        if job.abort_message is not None and self.aborts_while_paused():
            return True
        return self.paused is None and not self._is_held(job)

    def aborts_while_paused(self) -> bool:
        """Return whether an aborted generation ends now."""
        return True


async def _stop_accepting(runner: web.AppRunner) -> None:
    """Accept no further connection, and let the accepted ones reach the server.

    CPython 3.11 leaves a connection open, without a reader, if the server is closed before.
    """
    loop = asyncio.get_running_loop()
    for site in runner.sites:
        for listener in site._server.sockets:  # type: ignore[attr-defined]
            loop.remove_reader(listener.fileno())
    for _ in range(3):
        await asyncio.sleep(0)


def folder_content(path: str) -> str | None:
    """Return the identity of a folder's weights; None: a missing absolute path."""
    folder = Path(path)
    if not folder.is_dir():
        return None if folder.is_absolute() else path
    files = sorted(folder.glob("*.safetensors"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def json_answer(value: Any, status: int = 200) -> web.Response:
    """Return a response with JSON."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def error_answer(status: int, message: str) -> web.Response:
    """Return a response with an error as JSON."""
    return json_answer({"error": {"message": message, "code": status}}, status)
