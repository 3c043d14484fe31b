"""Serves SGLang's routes from an engine.

The event loop's thread never computes: it parses requests, waits for the engine and answers. New
weights come from a folder or through a process group. Every name and shape is checked before the
first byte is written. Generation continues while tensors of a group are received.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import typedefs, web

import arealite
from arealite.base import log
from arealite.base.model_folder import experts_of
from arealite.ext.embedded import protocol
from arealite.ext.embedded.decode_loop import Engine, LoopCommand
from arealite.ext.embedded.generation import Generation
from arealite.ext.embedded.group_member import GroupMember
from arealite.ext.embedded.protocol import Empty, Handler, RequestRefused, ServedModel
from arealite.ext.embedded.served_adapters import DEFAULT, read_low_rank
from arealite.ext.embedded.weight_loading import (
    ServedWeights,
    check_base,
    check_layout,
    is_adapter,
    stage_adapter,
    stage_tensors,
    stage_weights,
)
from arealite.ext.http_server.http_limits import MAX_BODY
from arealite.ext.weights.buckets import Layout
from arealite.ext.weights.checksums import sums

logger = log.get(__name__)

MAX_PROMPT = MAX_BODY + 2**20
"""Largest body of /generate in bytes, at any context length: a prompt of 131,072 tokens. It takes
less than 50 ms of CPU time to decode and check (tools/measure_requests.py)."""

EventStream = AsyncGenerator[bytes, None]
JsonBody = dict[str, object]
Routes = dict[str, Handler]
"""Handlers by path."""
encode = msgspec.json.Encoder().encode
T = TypeVar("T")

LONG_ANSWER = 10_000
"""Log-probabilities, which take 7 ms of CPU time to encode; a longer answer is encoded in another
thread."""

NAME_TAKEN = "The specified group name has already been created, please use a different group name."


class App:
    """Builds the aiohttp application: routes and their handlers."""

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        *,
        is_shared: bool,
        check: typedefs.Middleware,
    ) -> None:
        """Serve `model` with `engine`.

        Args:
            engine: The decode engine.
            model: Describes the model to clients.
            is_shared: Whether the trainer owns the model; no request then pauses or changes it.
            check: Middleware that refuses requests.
        """
        self.engine = engine
        self.model = model
        self._is_shared = is_shared
        self._check = check
        if not is_shared:
            self.weights = ServedWeights(
                engine.decoder.model,
                model.folder,
                quantizes=model.quantization is not None,
            )
        self._groups: dict[str, GroupMember] = {}

    def make(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[self._check])
        gets: dict[str, Callable[[], object]] = {
            "/health": web.Response,
            "/ready": lambda: web.Response(status=503 if self.engine.paused else 200),
            "/model_info": self.describe,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/v1/models": self._models,
            "/openapi.json": lambda: protocol.openapi(gets, posts),
        }
        posts: Routes = {
            "/generate": self._generate,
            "/abort_request": self._abort_request,
        }
        if not self._is_shared:
            posts |= {
                "/pause_generation": self._pause_generation,
                "/continue_generation": self._continue_generation,
                "/flush_cache": self._flush_cache,
                "/update_weights_from_disk": self._from_disk,
                "/update_weights_from_distributed": self._from_distributed,
                "/init_weights_update_group": self._init_group,
                "/destroy_weights_update_group": self._destroy_group,
                "/update_weight_version": self._relabel,
                "/load_lora_adapter": self._load_adapter,
                "/unload_lora_adapter": self._unload_adapter,
                "/weight_sums": self._weight_sums,
            }
            app.on_cleanup.append(self._leave_groups)
        app.add_routes([_get(path, handler) for path, handler in gets.items()])
        app.add_routes([_post(path, handler) for path, handler in posts.items()])
        return app

    def bodies(self) -> dict[str, int]:
        """Return the largest body in bytes, by path: a prompt, or the layout of all tensors."""
        token_bytes = len(str(self.model.vocab_size)) + len(", ")
        prompt_bytes = self.model.context_length * token_bytes
        sizes = {"/generate": min(MAX_PROMPT, MAX_BODY + prompt_bytes)}
        if not self._is_shared:
            layout = [
                (name, "torch.bfloat16", header.shape)
                for name, header in self.weights.names.headers.items()
            ]
            layout_bytes = len(encode(layout))
            sizes["/update_weights_from_distributed"] = MAX_BODY + 2 * layout_bytes
        return sizes

    async def _call(self, command: Callable[..., T], *args: object) -> T:
        """Run a method of the engine in the engine's thread."""
        return await asyncio.wrap_future(self.engine.call(command, *args))

    # ------------------------------------------------------------ requests

    async def _generate(self, body: protocol.GenerateBody) -> web.Response | EventStream:
        generation = protocol.generation_of(body, self.model)
        if body.stream:
            return self._events(generation, body)
        self.engine.call(self.engine.submit, generation)
        try:
            await generation.done.wait()
        except asyncio.CancelledError:  # the client closed its connection
            self.engine.call(self.engine.abort, lambda candidate: candidate is generation)
            raise
        if generation.error is not None:
            return _as_json({"error": {"message": generation.error}}, 500)
        make_answer = partial(
            protocol.answer,
            generation,
            version=self.engine.version_of(generation),
            logprobs=body.return_logprob,
        )
        if len(generation.output) * (1 + generation.num_top) > LONG_ANSWER:
            return _as_json(await asyncio.to_thread(make_answer))
        return _as_json(make_answer())

    async def _events(self, generation: Generation, body: protocol.GenerateBody) -> EventStream:
        """Yield server-sent events, each with the tokens since the one before.

        SGLang's events are the same with --incremental-streaming-output. If the client reads
        slowly, the next event has more tokens.
        """
        self.engine.call(self.engine.submit, generation)
        make_answer = partial(protocol.answer, generation, logprobs=body.return_logprob)
        start = 0
        is_last = False
        try:
            while not is_last:
                await generation.grown.wait()
                generation.grown.clear()
                is_last = generation.done.is_set() or generation.error is not None
                event = make_answer(
                    version=self.engine.version_of(generation),
                    start=start,
                    is_last=is_last,
                )
                start += len(event["output_ids"])
                if generation.error is not None:
                    event = {"error": {"message": generation.error, "code": 500}}
                yield b"data: %b\n\n" % encode(event)
            yield b"data: [DONE]\n\n"
        finally:
            if not is_last:  # the client closed its connection
                self.engine.call(self.engine.abort, lambda candidate: candidate is generation)

    async def _abort_request(self, body: protocol.AbortBody) -> web.Response:
        if body.abort_all:
            self.engine.call(self.engine.abort, lambda generation: True)
        elif body.rid:
            prefix = body.rid
            self.engine.call(
                self.engine.abort,
                lambda generation: generation.rid.startswith(prefix),
            )
        return web.Response()  # also for an unknown id

    async def _pause_generation(self, body: protocol.PauseGenerationReqInput) -> JsonBody:
        await self._call(self.engine.pause, body.mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue_generation(self, body: Empty) -> JsonBody:
        await self._call(self.engine.resume)
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush_cache(self, body: Empty) -> web.Response:
        if await self._call(self.engine.flush):
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Flush cache failed.\n")

    async def _weight_sums(self, body: Empty) -> JsonBody:
        """Return a checksum of each tensor under its name in the folder, for the self-check."""
        model = self.engine.decoder.model
        adapters = self.engine.decoder.adapters
        weights = adapters.merged(iter(model.state_dict().items()))
        named = self.weights.names.to_folder(weights)
        checksums = await self._call(lambda: sums(named, model))
        return {**checksums}

    # ------------------------------------------------------------ new weights

    async def _leave_groups(self, app: web.Application) -> None:
        """Leave all process groups; do not wait until they are destroyed."""
        for member in self._groups.values():
            member.leave()

    async def _from_disk(self, body: protocol.UpdateWeightFromDiskReqInput) -> JsonBody:
        path = body.model_path
        note = await self._update(body, lambda: self._stage_folder(path))
        logger.info("weights updated", version=self.engine.version, path=path)
        return _done("Succeeded to update model weights." + note)

    def _stage_folder(self, path: str) -> LoopCommand:
        """Check a folder of weights, or of an adapter; return a function that loads it.

        Raises:
            RequestRefused: The folder does not fit; the model is untouched.
        """
        if is_adapter(path):
            return stage_adapter(self.weights, self.engine.decoder.adapters, path)
        return self._replacing(lambda: stage_weights(self.weights, path))

    def _replacing(self, stage: Callable[[], LoopCommand]) -> LoopCommand:
        """Check whole weights, which contain the changes of the default adapter.

        Returns:
            A function that loads them and removes the default adapter.

        Raises:
            RequestRefused: See `stage`; or an adapter is loaded by name, which would change other
                weights than before.
        """
        if self.engine.adapter_versions:
            raise RequestRefused(
                "Failed to update weights: adapters are loaded by name. Unload them first."
            )
        load = stage()

        def replace() -> None:
            self.weights.is_base = False
            self.engine.decoder.adapters.remove(DEFAULT)
            load()

        return replace

    async def _load_adapter(self, body: protocol.LoadLoRAAdapterReqInput) -> JsonBody:
        """Load an adapter that requests may name; other requests are not interrupted."""
        name = body.lora_name
        version = body.weight_version
        self._check_base(body.lora_path)
        low_rank = await asyncio.to_thread(
            read_low_rank, self.engine.decoder.model, Path(body.lora_path)
        )
        await self._call(self.engine.load_adapter, name, low_rank, version)
        self.model.adapters[name] = version
        self.model.changed.set()
        logger.info("adapter loaded", name=name, version=version, path=body.lora_path)
        return {"success": True, "loaded_adapters": {**self.model.adapters}}

    def _check_base(self, path: str) -> None:
        """Refuse an adapter by name unless all rows of a batch share the weights of its base.

        Raises:
            RequestRefused: The model has experts, or other weights than its folder.
        """
        config = self.engine.decoder.model.config.to_dict()
        if experts_of(config) is not None:
            raise RequestRefused("A mixture of experts serves no adapters by name.")
        if not self.weights.is_base:
            raise RequestRefused(
                "The server's weights were updated: they are not those of an adapter's base."
            )
        check_base(self.weights, path)

    async def _unload_adapter(self, body: protocol.UnloadLoRAAdapterReqInput) -> JsonBody:
        name = body.lora_name
        if self.model.adapters.pop(name, None) is None:
            raise RequestRefused(f"No adapter '{name[:100]}' is loaded.")
        self.model.changed.set()
        await self._call(self.engine.unload_adapter, name)
        return {"success": True, "loaded_adapters": {**self.model.adapters}}

    async def _from_distributed(
        self, body: protocol.UpdateWeightsFromDistributedReqInput
    ) -> JsonBody:
        layout = Layout(names=body.names, dtypes=body.dtypes, shapes=body.shapes)
        member = self._groups.get(body.group_name)
        if member is None:
            raise RequestRefused(
                f"Failed to receive weights: Group {body.group_name} not in {list(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        check_layout(self.weights, layout)
        is_flat = body.load_format == "flattened_bucket"
        try:
            named = await member.receive(layout, flat=is_flat)
        except (RuntimeError, OSError) as error:
            raise RequestRefused(f"Failed to receive weights: {error}") from error
        stage = partial(
            stage_tensors,
            self.weights,
            named,
            member.parts,
            is_last=body.weight_version is not None,
        )
        note = await self._update(body, lambda: self._replacing(stage))
        return _done("Succeeded to update parameter online." + note)

    async def _update(
        self, body: protocol.WeightUpdateBody, stage: Callable[[], LoopCommand]
    ) -> str:
        """Change the weights between requests; return a sentence about the version."""
        version = body.weight_version
        update = self.engine.call_between_requests(
            self.engine.update,
            stage,
            version,
            body.flush_cache,
        )
        is_flushed = await asyncio.wrap_future(update)
        if not is_flushed:
            raise RequestRefused(
                "Weights were updated, but the cache was not flushed because requests are still "
                "running or queued. Retract or finish them, then call /flush_cache."
            )
        if version is None:
            return ""
        self.model.relabel(version)
        return f" Weight version updated to {version}."

    async def _init_group(self, body: protocol.InitWeightsUpdateGroupReqInput) -> JsonBody:
        name = body.group_name
        if name in self._groups:
            raise RequestRefused(f"Failed to initialize custom process group: {NAME_TAKEN}")
        member = GroupMember(name, body.backend, self.engine.decoder.model.device)
        address = (body.master_address, body.master_port)
        self._groups[name] = member
        try:
            await member.join(address, rank=body.rank_offset, world_size=body.world_size)
        except BaseException as error:
            self._groups.pop(name, None)
            if isinstance(error, (RuntimeError, OSError, ValueError)):
                message = f"Failed to initialize custom process group: {error}."
                raise RequestRefused(message) from error
            raise
        logger.info("weight group joined", group=name, size=body.world_size)
        return _done("Succeeded to initialize custom process group.")

    async def _destroy_group(self, body: protocol.DestroyWeightsUpdateGroupReqInput) -> JsonBody:
        member = self._groups.pop(body.group_name, None)
        if member is None:
            raise RequestRefused("The group to be destroyed does not exist.")
        await asyncio.wrap_future(member.leave())
        return _done("Succeeded to destroy custom process group.")

    async def _relabel(self, body: protocol.UpdateWeightVersionReqInput) -> JsonBody:
        version = body.new_version
        if body.abort_all_requests:
            self.engine.call(self.engine.abort, lambda generation: True)
        await self._call(self.engine.relabel, version)
        self.model.relabel(version)
        return _done(f"Weight version updated to {version}") | {"new_version": version}

    # ------------------------------------------------------------ descriptions

    def describe(self) -> JsonBody:
        """Return the answer of /model_info."""
        model = self.model
        return {
            "model_path": model.folder,
            "weight_version": model.version,
            "model_type": model.model_type,
            "architectures": model.architectures,
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "adapters": model.adapters,
            "paused_s": self.engine.paused_s,
        }

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        return str(self.engine.decoder.model.dtype).removeprefix("torch.")

    def _server_info(self) -> JsonBody:
        return self.describe() | {
            "version": arealite.__version__,
            "backend": "arealite-embedded",
            "tp_size": 1,
            "dp_size": 1,
            "dtype": self.dtype,
            "quantization": self.model.quantization,
            "last_pause_s": self.engine.last_pause_s,
        }

    def load(self) -> dict[str, int]:
        """Return the numbers of running and waiting requests, and how many can run at a time."""
        return {
            "running": len(self.engine.decoder.running),
            "waiting": len(self.engine.waiting),
            "capacity": self.engine.decoder.max_rows,
        }

    def _loads(self) -> JsonBody:
        load = self.load()
        copy_of_model = {
            "num_running_reqs": load["running"],
            "num_waiting_reqs": load["waiting"],
            "max_running_requests": load["capacity"],
        }
        return {"loads": [copy_of_model]}

    def _models(self) -> JsonBody:
        model = {"id": self.model.folder, "max_model_len": self.model.context_length}
        return {"object": "list", "data": [model]}


def _get(path: str, handler: Callable[[], object]) -> web.RouteDef:
    """Return a GET route whose answer is the result of `handler`."""

    async def handle(request: web.Request) -> web.Response:
        return _as_json(handler())

    return web.get(path, handle)


def _post(path: str, handler: Handler) -> web.RouteDef:
    """Return the route that passes a POST's parsed body to `handler`.

    It answers a refusal in SGLang's two forms: of /generate, and of the weight routes.
    """
    body_type = protocol.body_of(handler)

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            body = protocol.parse(await request.read(), body_type)
            answer = await handler(body)
        except RequestRefused as error:
            message = str(error)
            refusal = {
                "success": False,
                "message": message,
                "error": {"message": message},
            }
            return _as_json(refusal, 400)
        if not isinstance(answer, AsyncGenerator):
            return _as_json(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with aclosing(answer):
            await response.prepare(request)
            async for event in answer:
                await response.write(event)
        return response

    return web.post(path, handle)


def _done(message: str) -> JsonBody:
    return {"success": True, "message": message}


def _as_json(answer: object, status: int = 200) -> web.Response:
    if isinstance(answer, web.Response):
        return answer
    return web.Response(
        body=encode(answer),
        status=status,
        content_type="application/json",
    )
