"""A scripted server that speaks vLLM's protocol (`tests/fakes/scripted_server.py`).

It behaves as vLLM 0.32 does on the wire. Its weights are in `tests/fakes/vllm_weights.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

from aiohttp import web

from tests.fakes.adapters import VLLMAdapters
from tests.fakes.scripted_server import (
    BODY,
    Handler,
    Job,
    ScriptedServer,
    SentRequest,
    error_answer,
    json_answer,
)
from tests.fakes.vllm_weights import VLLMWeights

ID_PREFIX = "generate-tokens-"
"""Put before the id of a request; aborts need it."""
NAME_OF_PARAMETER = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
SAMPLING_PARAMETERS = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop"),
        *("stop_token_ids", "ignore_eos", "logprobs", "detokenize", "stream_interval"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
        "routed_experts_prompt_start",
    )
)
"""Names that vLLM knows; it ignores others."""
MODE_OF_PAUSE = {
    ("abort", True): "abort",
    ("abort", False): "abort",
    ("keep", True): "retract",
    ("keep", False): "in_place",
}
_starts = itertools.count()


class FakeVLLM(ScriptedServer):
    """One fake vLLM server."""

    generate_path = "/inference/v1/generate"
    pause_path = "/pause"
    load_path = "/update_weights"
    continue_path = "/resume"
    relabel_path = "/update_weight_version"
    first_load_path = "/collective_rpc arealite_check_weights"
    probe_paths = ("/is_paused", "/version", "/get_world_size")

    def set_up(self) -> None:
        self.program_version = "0.32.0"
        self.has_modules = True
        """False: stock vLLM, without the modules of ext/vllm/inside."""
        self.dev_mode = True
        """False: no routes for pauses and weights, as without VLLM_SERVER_DEV_MODE."""
        self.scale_out = True
        """False: requests for tokens are refused, as without --enable-scale-out."""
        self.logprobs_mode = "processed_logprobs"
        self.dtype = "float32"
        self.device = "cuda"
        self.is_repairable = True
        """False: only a restart repairs the model after a failed update."""
        self.stale_prefix_hits = 0
        """Prompts that were answered with a cached prefix of earlier weights."""
        self.broken_tokens = 0
        """Tokens sampled from incomplete weights; each one ends the server."""
        self.weights = VLLMWeights(self)
        self._adapters = VLLMAdapters(self)
        self.start_id = ""

    @property
    def adapters(self) -> VLLMAdapters:
        return self._adapters

    def forget(self) -> None:
        self.weights.forget()

    async def _start(self) -> None:
        self.start_id = f"start-{next(_starts)}"
        self.weights.forget()
        await super()._start()

    def entry(self) -> dict[str, Any]:
        return super().entry() | {"protocol": "vllm"}

    def posts(self) -> dict[str, Handler]:
        always = self.adapters.handlers() | {"/inference/v1/abort_requests": self._abort}
        with_dev_mode: dict[str, Handler] = {
            "/abort_requests": self._abort,
            "/pause": self._pause,
            "/resume": self._resume,
        }
        if self.dev_mode:
            return always | with_dev_mode | self.weights.handlers()
        return always

    def gets(self) -> dict[str, Handler]:
        always: dict[str, Handler] = {
            "/version": self._version,
            "/v1/models": self._models,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        with_dev_mode: dict[str, Handler] = {
            "/is_paused": self._is_paused,
            "/weight_info": self._weight_info,
            "/server_info": self._server_info,
            "/get_world_size": self._world_size,
        }
        return always | with_dev_mode if self.dev_mode else always

    def route_of(self, path: str, body: dict[str, Any]) -> str:
        """Name the method of an RPC, too."""
        if path == "/collective_rpc":
            return f"{path} {body.get('method')}"
        return path

    # ------------------------------------------------------------ description

    async def _version(self, request: web.Request) -> web.Response:
        return json_answer({"version": self.program_version})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": "m",
            "object": "model",
            "owned_by": "vllm",
            "root": self.model_path,
            "max_model_len": self.context_length,
        }
        return json_answer({"object": "list", "data": [model, *self.adapters.models()]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return json_answer({"weight_version": self.version})

    async def _server_info(self, request: web.Request) -> web.Response:
        if request.query.get("config_format") != "json":
            return json_answer({"vllm_config": f"model='{self.model_path}', …"})
        model_config = {
            "model": self.model_path,
            "dtype": f"torch.{self.dtype}",
            "quantization": None,
            "logprobs_mode": self.logprobs_mode,
        }
        config = {
            "instance_id": self.start_id,
            "model_config": model_config,
            "device_config": {"device": self.device},
            "lora_config": None,
        }
        has_adapters = bool(self.adapters.max_rank)
        if has_adapters:
            config["lora_config"] = {"max_lora_rank": self.adapters.max_rank}
        environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": has_adapters}
        return json_answer({"vllm_config": config, "vllm_env": environment})

    async def _metrics(self, request: web.Request) -> web.Response:
        load = self.load()
        label = '{engine="0",model_name="m"}'
        lines = (
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{label} {float(load['running'])}",
            f"vllm:num_requests_waiting{label} {float(load['waiting'])}",
            f"vllm:num_requests_waiting_by_reason{label} 7.0",
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def _openapi(self, request: web.Request) -> web.Response:
        posts = {path: {"post": {}} for path in (self.generate_path, *self.posts())}
        return json_answer({"paths": posts | {path: {"get": {}} for path in self.gets()}})

    async def _world_size(self, request: web.Request) -> web.Response:
        return json_answer({"world_size": 1})

    async def _is_paused(self, request: web.Request) -> web.Response:
        self.asked_pause.set()
        return json_answer({"is_paused": self.paused is not None})

    # ------------------------------------------------------------ generation

    def read_request(self, body: dict[str, Any]) -> SentRequest:
        parameters = body.get("sampling_params") or {}
        return SentRequest(
            rid=body.get("request_id") or "",
            input_ids=body.get("token_ids"),
            sampling={
                NAME_OF_PARAMETER.get(name, name): value
                for name, value in parameters.items()
                if name in SAMPLING_PARAMETERS
            },
            is_stream=bool(body.get("stream")),
            scores_prompt=parameters.get("prompt_logprobs") is not None,
            adapter=body.get("model") or "",
        )

    def refusal(self, sent: SentRequest) -> str | None:
        prompt = sent.input_ids
        if not isinstance(prompt, list) or not prompt:
            return "token_ids must not be empty"
        if len(prompt) >= self.context_length:
            return (
                f"This model's maximum context length is {self.context_length} tokens. "
                f"However, your request has {len(prompt)} input tokens."
            )
        foreign_ids = [token for token in prompt if not 0 <= token < self.vocab_size]
        if foreign_ids:
            return f"Token id {foreign_ids[0]} is out of vocabulary"
        if sent.sampling.get("max_new_tokens", 1) < 1:
            return "max_tokens must be at least 1"
        if sent.sampling.get("temperature", 1.0) < 0:
            return "temperature must be non-negative"
        if sent.sampling.get("stop") and not sent.sampling.get("detokenize", True):
            return "stop strings are only supported when detokenize is True"
        return None

    def budget(self, sent: SentRequest) -> int:
        """Return the budget; a longer one than the context has room for is clipped."""
        room = self.context_length - len(sent.input_ids)
        return min(room, sent.sampling.get("max_new_tokens", room))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            return error_answer(403, "start the server with --enable-scale-out")
        return await super()._generate(request)

    async def sample(self, job: Job) -> int:
        """Return the next token; incomplete weights end the server."""
        if self.weights.is_broken:
            self.broken_tokens += 1
            await self.die()
        if not job.output:
            self.stale_prefix_hits += self.weights.uses_stale_prefix(job.prompt, job.adapter)
        return await super().sample(job)

    def whole_answer(self, job: Job) -> dict[str, Any]:
        return self._body(job, 0)

    def add_scores(
        self, answer: dict[str, Any], ids: list[int], scores: list[float], top: list[float]
    ) -> None:
        """Add them as vLLM does: by place, the prompt's own token first, then the best ones."""
        places: list[dict[int, dict[str, Any]] | None] = [None]
        for token, logprob in zip(ids[1:], scores, strict=True):
            places.append({token: {"logprob": logprob, "rank": 99, "decoded_token": None}})
        last = places[-1]
        assert last is not None
        for rank, logprob in enumerate(top, start=1):
            if logprob != scores[-1]:  # the token itself
                last[1000 + rank] = {"logprob": logprob, "rank": rank, "decoded_token": None}
        answer["prompt_logprobs"] = places

    def set_next(self, answer: dict[str, Any], top: list[float]) -> None:
        first = answer["choices"][0]["logprobs"]["content"][0]
        first["logprob"] = top[0]
        first["top_logprobs"] = [
            {"token_id": token, "logprob": logprob, "rank": token + 1}
            for token, logprob in enumerate(top)
        ]

    def event(self, job: Job, num_sent: int) -> dict[str, Any]:
        """Return the new tokens; the last event has the versions of all tokens."""
        return self._body(job, num_sent)

    def _body(self, job: Job, num_sent: int) -> dict[str, Any]:
        ids = job.output[num_sent:]
        content = [
            {"token_id": token, "logprob": self.logprob(token), "rank": 1, "top_logprobs": []}
            for token in self.logged(ids)
        ]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": job.finish,
            "stop_reason": job.matched,
            "routed_experts": None,
            "weight_versions": job.spans() if job.finish is not None else None,
        }
        return {"request_id": ID_PREFIX + job.rid, "model": "m", "choices": [choice]}

    async def _abort(self, request: web.Request) -> web.Response:
        ids = request[BODY].get("request_ids")
        if ids is None:
            await self.abort_all()
            return json_answer({"status": "aborted", "aborted": 0})
        for request_id in ids:
            self.abort_rids.append(request_id.removeprefix(ID_PREFIX))
        for job in self._jobs.values():
            if ID_PREFIX + job.rid in ids:
                job.abort_message = "Aborted"
        await self._notify()
        return json_answer({"status": "aborted", "aborted": len(ids)})

    # ------------------------------------------------------------ pauses and weights

    async def pause(self, mode: str) -> None:
        await super().pause(mode)
        if mode != "in_place":
            self.weights.drop_prefixes()

    async def _pause(self, request: web.Request) -> web.Response:
        query = request.query
        clears_cache = query.get("clear_cache", "true") == "true"
        mode = MODE_OF_PAUSE.get((query.get("mode", "abort"), clears_cache))
        if mode is None:
            return error_answer(400, f"the fake has no pause mode {query['mode']!r}")
        await self.pause(mode)
        return json_answer({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        obstacle = self.weights.obstacle
        if self.has_modules and obstacle:
            return error_answer(409, obstacle)
        await self.resume()
        return json_answer({"status": "resumed"})

    async def update_weights(self, version: str, *, keep_cache: bool = False) -> None:
        self.weights.complete(f"weights {version}")
        self.version = version
        if not keep_cache:
            self.weights.drop_prefixes()

    def suffer(self, kind: str, route: str) -> None:
        """Leave the model half loaded if a load of weights fails or does not end."""
        if kind in ("500", "hang"):
            self.weights.fail(route, f"scripted {kind}")

    @property
    def holds_blocks(self) -> bool:
        """Whether running generations hold the KV cache, so that no prefix can be dropped."""
        has_begun = any(job.output for job in self._jobs.values())
        return has_begun and self.paused != "retract"
