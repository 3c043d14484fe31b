"""A scripted server that speaks SGLang's native protocol (`tests/fakes/scripted_server.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from tests.fakes.adapters import SGLangAdapters
from tests.fakes.scripted_server import (
    BODY,
    Handler,
    Job,
    ScriptedServer,
    SentRequest,
    error_answer,
    json_answer,
)
from tests.fakes.sglang_weights import WeightRoutes

INFO_PATHS = ("/model_info", "/get_model_info", "/server_info", "/get_server_info")


class FakeSGLang(ScriptedServer):
    """One fake SGLang server."""

    generate_path = "/generate"
    pause_path = "/pause_generation"
    load_path = "/update_weights_from_disk"
    continue_path = "/continue_generation"
    relabel_path = "/update_weight_version"
    first_load_path = load_path
    probe_paths = ("/openapi.json", "/server_info", continue_path)

    def set_up(self) -> None:
        self.disjoint = False
        """True: as with --incremental-streaming-output, an event has only its new tokens."""
        self.spans = True
        """False: like SGLang before 0.5.19, no per-token versions."""
        self.sessions = True
        """False: like SGLang before 0.5.21, no begin_weight_update and end_weight_update."""
        self.tells_pause = True
        """False: like SGLang 0.5.9, no /ready."""
        self.pause_modes = ("abort", "retract", "in_place")
        self.buckets = True
        """False: distributed updates refuse flattened_bucket."""
        self.checksum: str | None = ""
        """"": checksum of the weights; other text: this wrong checksum; None: no route."""
        self._updating = False
        self._reported: str | None = None
        """The version in /model_info if it differs from `version` (update without a flush)."""
        self.weights = WeightRoutes(self)
        self._adapters = SGLangAdapters(self)

    @property
    def adapters(self) -> SGLangAdapters:
        return self._adapters

    def forget(self) -> None:
        self._updating = False
        self._reported = None
        self.weights.forget()

    @property
    def reported(self) -> str:
        """The version in /model_info."""
        return self.version if self._reported is None else self._reported

    def posts(self) -> dict[str, Handler]:
        own: dict[str, Handler] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
        }
        return own | self.weights.handlers() | self.adapters.handlers()

    def gets(self) -> dict[str, Handler]:
        own: dict[str, Handler] = {
            "/ready": self._ready,
            "/v1/loads": self._loads,
            "/v1/models": self._models,
            "/openapi.json": self._openapi,
        }
        return own | dict.fromkeys(INFO_PATHS, self._info)

    # ------------------------------------------------------------ description

    async def _ready(self, request: web.Request) -> web.Response:
        self.asked_pause.set()
        if not self.tells_pause:
            return web.Response(status=404)
        return web.Response(status=503 if self.paused else 200)

    async def _info(self, request: web.Request) -> web.Response:
        extra = {"is_generation": True, "weight_version": self.reported, "status": "ready"}
        return json_answer(
            self.entry()
            | extra
            | {
                "tp_size": 1,
                "dp_size": 1,
                "dtype": "float32",
                "enable_lora": bool(self.adapters.max_rank),
                "max_req_input_len": self.context_length,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model_path, "max_model_len": self.context_length}
        return json_answer({"object": "list", "data": [model, *self.adapters.models()]})

    async def _loads(self, request: web.Request) -> web.Response:
        now = self.load()
        load = {"num_running_reqs": now["running"], "num_waiting_reqs": now["waiting"]}
        load |= {"dp_rank": 0, "max_running_requests": self.capacity}
        return json_answer({"version": "0.5.23", "loads": [load]})

    async def _openapi(self, request: web.Request) -> web.Response:
        own = ["/generate", "/abort_request", "/pause_generation", "/continue_generation"]
        return json_answer(self.weights.openapi(own))

    # ------------------------------------------------------------ generation

    def read_request(self, body: dict[str, Any]) -> SentRequest:
        rid = body.get("rid")
        return SentRequest(
            rid=rid if isinstance(rid, str) else "",
            input_ids=body.get("input_ids"),
            sampling=body.get("sampling_params") or {},
            is_stream=bool(body.get("stream")),
            scores_prompt=body.get("logprob_start_len") == 0,
            adapter=body.get("lora_path") or "",
        )

    def refusal(self, sent: SentRequest) -> str | None:
        prompts = sent.input_ids
        if not isinstance(prompts, list) or not prompts:
            return "Either text, input_ids or input_embeds should be provided."
        for prompt in prompts if isinstance(prompts[0], list) else [prompts]:
            length = len(prompt)
            if length >= self.context_length:
                return (
                    f"The input ({length} tokens) is longer than the model's context length "
                    f"({self.context_length} tokens)."
                )
            if length + self.budget(sent) > self.context_length:
                return (
                    "Requested token count exceeds the model's maximum context length of "
                    f"{self.context_length} tokens."
                )
            if not all(0 <= token < self.vocab_size for token in prompt):
                return f"input_ids must lie in [0, {self.vocab_size})."
        temperature = sent.sampling.get("temperature", 1.0)
        if temperature < 0:
            return f"temperature must be a non-negative finite number, got {temperature}."
        return None

    def budget(self, sent: SentRequest) -> int:
        return sent.sampling.get("max_new_tokens", 128)

    async def tokens(self, job: Job) -> AsyncIterator[None]:
        """Generate, but not while an update runs."""
        await self._until(lambda: not self._updating)
        async for _ in super().tokens(job):
            yield

    def aborts_while_paused(self) -> bool:
        return self.paused != "in_place"

    def whole_answer(self, job: Job) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": _finish_reason(job),
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(job.output),
            "cached_tokens": 0,
            "weight_version": self.version,
            "num_retractions" if self.spans else "total_retractions": job.retractions,
            "output_token_logprobs": [
                [self.logprob(token), token, None] for token in self.logged(job.output)
            ],
        }
        if self.spans and job.finish is not None:
            meta["weight_versions"] = job.spans()
        text = "".join(chr(token) for token in job.output)
        return {"text": text, "output_ids": list(job.output), "meta_info": meta}

    def add_scores(
        self, answer: dict[str, Any], ids: list[int], scores: list[float], top: list[float]
    ) -> None:
        pairs = zip([None, *scores], ids, strict=True)
        last = [[logprob, token, None] for token, logprob in enumerate(top)]
        meta = answer["meta_info"]
        meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        meta["input_top_logprobs"] = [None, *([[]] * (len(ids) - 2)), last]

    def set_next(self, answer: dict[str, Any], top: list[float]) -> None:
        meta = answer["meta_info"]
        meta["output_token_logprobs"][0][0] = top[0]
        tokens = [[logprob, token, None] for token, logprob in enumerate(top)]
        meta["output_top_logprobs"] = [tokens]

    def event(self, job: Job, num_sent: int) -> dict[str, Any]:
        event = self.whole_answer(job)
        if self.disjoint:
            for place, key in (
                (event, "text"),
                (event, "output_ids"),
                (event["meta_info"], "output_token_logprobs"),
            ):
                place[key] = place[key][num_sent:]
        return event

    async def _abort(self, request: web.Request) -> web.Response:
        body = request[BODY]
        self.abort_rids.append(body.get("rid") or "")
        for job in self._jobs.values():
            if body.get("abort_all") or job.rid.startswith(body.get("rid") or "\0"):
                job.abort_message = "Aborted"
        await self._notify()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request[BODY].get("mode", "abort")
        if mode not in self.pause_modes:
            return error_answer(400, f"Invalid pause mode {mode!r}")
        await self.pause(mode)
        return json_answer({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self.resume()
        return json_answer({"message": "Generation continued successfully.", "status": "ok"})

    # ------------------------------------------------------------ for the weight routes

    async def update_weights(self, version: str, *, keep_cache: bool = False) -> None:
        await self.change({"weight_version": version, "flush_cache": not keep_cache})

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
            await self.abort_all()
        await self.still()
        old, version = self.reported, body.get("weight_version")
        self.version = self.version if version is None else version
        dirty = bool(self.paused == "in_place" and self._jobs and body.get("flush_cache", True))
        self._reported = old if dirty else None
        return not dirty

    async def relabel(self, version: str, *, abort: bool) -> None:
        """Change the reported version."""
        if abort:
            await self.abort_all()
        self.version, self._reported = version, None

    async def _flush(self, request: web.Request) -> web.Response:
        busy = self._jobs and self.paused != "retract"
        return web.Response(text="Cache flushed.\n", status=400 if busy else 200)


def _finish_reason(job: Job) -> dict[str, Any] | None:
    """Return the finish reason of a generation in SGLang's form."""
    if job.finish == "abort":
        return {"type": "abort", "message": job.abort_message}
    if job.finish == "stop":
        return {"type": "stop", "matched": job.matched}
    if job.finish == "length":
        return {"type": "length", "length": job.budget}
    return None
