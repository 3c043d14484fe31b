"""Serves a transformers model through SGLang's protocol, in one process.

With this server, the whole system runs on machines without SGLang, weight updates included.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import typedefs, web
from transformers import PreTrainedModel

from arealite.api.agent import load_tokenizer
from arealite.api.experiment_config import ServerConfig
from arealite.api.llm_server import LLMServer
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.base.folder_checks import check_address
from arealite.base.model_folder import exact_length
from arealite.base.signals import STOP
from arealite.ext.embedded.batch_invariance import check_batch_invariant
from arealite.ext.embedded.cache_decoder import make_decoder
from arealite.ext.embedded.decode_loop import Engine
from arealite.ext.embedded.generation import Generation
from arealite.ext.embedded.protocol import ServedModel
from arealite.ext.embedded.server_app import App
from arealite.ext.embedded.weight_loading import load_model
from arealite.ext.http_server.http_guard import guard
from arealite.ext.http_server.http_limits import LimitedRunner
from arealite.system.health import vitals
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)

SHUTDOWN_S = 2.0
"""Time to send the answers of aborted requests."""


class EmbeddedServer(LLMServer):
    """A server with one model, one engine thread and one HTTP port."""

    def __init__(self, args: ServerConfig, *, shared: PreTrainedModel | None = None) -> None:
        """Load nothing yet.

        Args:
            args: Configures the server.
            shared: A model of the caller, in this process. Only the caller changes it, between
                `pause` and `resume`. The server starts paused.
        """
        self.config = args
        self._shared = shared
        self.address = ""
        """Where it listens; set before `ready`."""
        self.ready = asyncio.Event()
        self._registry = NameRegistry.of(args)
        self._stopped: asyncio.Future[BaseException | None]
        """Resolves at the end: the engine's error, or None after a stop."""

    async def serve(self) -> None:
        """Serve until cancelled or terminated; then running requests get the output they have.

        Raises:
            UserError: The model or the port cannot be used.
            RoleError: The engine crashed.
        """
        loop = asyncio.get_running_loop()
        is_shared = self._shared is not None
        model, tokenizer = await asyncio.to_thread(self._load)
        self._stopped = loop.create_future()
        self.engine = await asyncio.to_thread(self._make_engine, model, loop)
        self._model = self._describe(model, tokenizer)
        app = App(
            self.engine,
            self._model,
            is_shared=is_shared,
            check=self._guard(),
        )
        runner = LimitedRunner(
            app.make(),
            bodies=app.bodies(),
            shutdown_timeout=SHUTDOWN_S,
        )
        await runner.setup()
        if is_shared:
            self.engine.paused = "in_place"
        self.engine.start()
        try:
            with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
                loop.add_signal_handler(STOP, self.stop, None)
            await self._listen(runner)
            await self._until_stopped(app)
        finally:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(STOP)
            await asyncio.to_thread(self.engine.close)
            await runner.cleanup()

    @property
    def entry_id(self) -> str:
        """The id of its entry in the name registry."""
        return self.address.removeprefix("http://").replace(":", "-")

    def stop(self, error: BaseException | None) -> None:
        """Make `serve` return, or raise RoleError if the engine crashed with `error`."""
        if not self._stopped.done():
            self._stopped.set_result(error)

    def pause(self, mode: str) -> Future[None]:
        """Stop generating, as /pause_generation does; done once no forward pass runs."""
        return self.engine.call(self.engine.pause, mode)

    def resume(self, version: str) -> Future[None]:
        """Continue generating; the shared weights are of `version` now."""
        self.engine.call(self.engine.decoder.drop_prefix)
        self.engine.call(self.engine.relabel, version)
        with suppress(RuntimeError):  # the loop has ended, and the name entry with it
            self._stopped.get_loop().call_soon_threadsafe(self._model.relabel, version)
        return self.engine.call(self.engine.resume)

    def _guard(self) -> typedefs.Middleware:
        """Return the middleware that checks the token and the Host header of requests."""
        secret = self._registry.secret
        return guard(
            secret.token if secret else "",
            self.config.llm_server.host,
            self.config.cluster.host,
            self.config.reachable_host,
        )

    def _load(self) -> tuple[PreTrainedModel, Any]:
        model = self.config.model
        if self._shared is not None:
            return self._shared, load_tokenizer(model.path)
        options = self.config.llm_server.embedded
        return load_model(
            model.path,
            dtype=model.dtype,
            device=options.device,
            batch_invariant=options.batch_invariant,
        )

    async def _listen(self, runner: web.AppRunner) -> None:
        server = self.config.llm_server
        await asyncio.to_thread(check_address, server.host, server.port, at="llm_server")
        await web.TCPSite(runner, server.host, server.port).start()
        _, port, *_ = runner.addresses[0]
        self.address = f"http://{self.config.reachable_host}:{port}"

    async def _until_stopped(self, app: App) -> None:
        """Keep the server registered until it is stopped or its engine crashes."""
        if self._shared is None:
            vitals.rename(f"llm_server-{self.entry_id}")
        registered = self._registry.registered(
            "llm_server",
            self.entry_id,
            lambda: self._entry(app),
            changed=self._model.changed,
        )
        async with registered:
            logger.info("server ready", address=self.address, model=app.model.folder)
            self.ready.set()
            error = await self._stopped
        if error is not None:
            raise RoleError(f"llm_server {self.address}: the engine crashed: {error}")

    def _make_engine(self, model: PreTrainedModel, loop: asyncio.AbstractEventLoop) -> Engine:
        def post(callback: Callable[..., None], *arguments: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: no request is left
                loop.call_soon_threadsafe(callback, *arguments)

        options = self.config.llm_server.embedded
        decoder = make_decoder(
            model,
            max_rows=options.max_running_requests,
            seed=self.config.seed,
            batch_invariant=options.batch_invariant,
        )
        if options.batch_invariant:
            check_batch_invariant(decoder)
        return Engine(
            decoder=decoder,
            num_threads=options.num_threads,
            deliver=partial(post, _notify),
            on_crash=partial(post, self.stop),
        )

    def _describe(self, model: PreTrainedModel, tokenizer: Any) -> ServedModel:
        eos_ids = model.generation_config.eos_token_id
        if not isinstance(eos_ids, list):
            eos_ids = [eos_ids]
        all_eos_ids = {tokenizer.eos_token_id, *eos_ids}
        lock = threading.Lock()  # the engine looks for stop strings while answers are made

        def decode(ids: list[int], skip_special: bool) -> str:
            with lock:
                return tokenizer.decode(ids, skip_special_tokens=skip_special)

        folder = os.path.abspath(os.path.expanduser(self.config.model.path))
        quantization = self.config.llm_server.embedded.quantization
        return ServedModel(
            folder=folder,
            model_type=model.config.model_type,
            architectures=list(model.config.architectures or [type(model).__name__]),
            vocab_size=model.config.get_text_config().vocab_size,
            context_length=self._context_length(model),
            eos_token_ids=frozenset(all_eos_ids - {None}),
            decode=decode,
            quantization=quantization if quantization != "none" else None,
        )

    def _context_length(self, model: PreTrainedModel) -> int:
        """Return `llm_server.context_length`, or the model's limit if the option is not set.

        Raises:
            UserError: The option is above the model's limit.
        """
        fields = model.config.get_text_config().to_dict()
        model_length = exact_length(fields) or fields.get("max_position_embeddings") or 2**20
        configured = self.config.llm_server.context_length
        if configured is not None and configured > model_length:
            raise UserError(
                f"llm_server.context_length={configured} is above the model's own {model_length}."
            )
        return configured or model_length

    def _entry(self, app: App) -> dict[str, object]:
        """Return the server's entry for the name registry."""
        info = app.describe()
        return {
            "address": self.address,
            "type": "embedded" if self._shared is None else "shared",
            "version": info.pop("weight_version"),
            **info,
            "dtype": app.dtype,
            "load": app.load(),
            "host": self.config.cluster.host,
            "pid": os.getpid(),
        }


def _notify(grown: list[Generation], ended: list[Generation]) -> None:
    for generation in ended:
        generation.done.set()
    for generation in (*grown, *ended):
        generation.grown.set()
