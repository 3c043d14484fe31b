"""The server for laptops: a transformers model behind SGLang's protocol, in one process.

So that the whole system, weight updates and interruptions included, runs where SGLang cannot.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from typing import Any

from aiohttp import web

from arealite.api.config import ServerConfig, name_dir
from arealite.api.llm import LLMServer
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.impl.server.app import App, Identity
from arealite.impl.server.decoder import Decoder
from arealite.impl.server.engine import Engine
from arealite.impl.server.generation import Generation
from arealite.impl.server.protocol import Limits
from arealite.impl.server.weights import load_model
from arealite.system.name_registry import NameRegistry

logger = log.get(__name__)

SHUTDOWN_S = 2.0
"""Time for answers of aborted requests to leave."""


class EmbeddedServer(LLMServer):
    """One model, one engine thread, one HTTP port."""

    def __init__(self, args: ServerConfig) -> None:
        self.config = args
        self.address = ""
        """Where it listens; set before `ready`."""
        self.ready = asyncio.Event()
        self._died: asyncio.Future[BaseException] | None = None

    async def serve(self) -> None:
        """Serve until cancelled or told to terminate; requests in flight then get what they have.

        Raises:
            UserError: the model or the port cannot be used.
            RoleError: the engine died.
        """
        config = self.config
        model, tokenizer = await asyncio.to_thread(
            load_model,
            config.model.path,
            dtype=config.model.dtype,
            device=config.llm_server.embedded.device,
        )
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(signal.SIGTERM, stop.set)
        engine = self._engine(model)
        app = App(engine, self._limits(model, tokenizer), self._identity(model))
        runner = web.AppRunner(
            app.make(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        engine.start()
        try:
            await self._listen(runner)
            await self._until_stopped(app, stop)
        finally:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGTERM)
            await asyncio.to_thread(engine.close)
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> None:
        server = self.config.llm_server
        try:
            await web.TCPSite(runner, server.host, server.port).start()
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise UserError(
                f"llm_server cannot listen on {server.host}:{server.port}: {why}. "
                "Choose another llm_server.port, or 0 for a free one."
            ) from error
        host = server.host
        if host in ("0.0.0.0", "::", ""):
            host = self.config.cluster.host
        self.address = f"http://{host}:{runner.addresses[0][1]}"

    async def _until_stopped(self, app: App, stop: asyncio.Event) -> None:
        """Hold the server's name until told to stop or the engine dies."""
        config = self.config
        registry = NameRegistry(name_dir(config), ttl_s=config.cluster.ttl_s)
        entry_id = self.address.removeprefix("http://").replace(":", "-")
        self._died = asyncio.get_running_loop().create_future()
        async with registry.registered(
            "llm_server",
            entry_id,
            lambda: self._entry(app),
            heartbeat_s=config.cluster.heartbeat_s,
        ):
            logger.info("server ready", address=self.address, model=app.identity.model_path)
            self.ready.set()
            stopping = asyncio.ensure_future(stop.wait())
            try:
                await asyncio.wait((stopping, self._died), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
        if self._died.done():
            raise RoleError(f"llm_server {self.address}: the engine died: {self._died.result()}")

    def _engine(self, model: Any) -> Engine:
        loop = asyncio.get_running_loop()

        def deliver(generations: list[Generation]) -> None:
            with suppress(RuntimeError):  # the loop is gone: nobody waits any more
                loop.call_soon_threadsafe(_notify, generations)

        def died(error: BaseException) -> None:
            loop.call_soon_threadsafe(self.on_engine_death, error)

        options = self.config.llm_server.embedded
        return Engine(
            Decoder(model, max_rows=options.max_running_requests, seed=self.config.seed),
            num_threads=options.num_threads,
            deliver=deliver,
            on_death=died,
        )

    def on_engine_death(self, error: BaseException) -> None:
        """Make `serve` raise: a server that cannot generate must not look alive."""
        if self._died is not None and not self._died.done():
            self._died.set_result(error)

    def _limits(self, model: Any, tokenizer: Any) -> Limits:
        config = model.config.get_text_config()
        own = getattr(config, "max_position_embeddings", None) or 2**20
        wanted = self.config.llm_server.context_length
        if wanted is not None and wanted > own:
            raise UserError(
                f"llm_server.context_length={wanted} is more than the model's own {own}."
            )
        eos = model.generation_config.eos_token_id
        ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
        lock = threading.Lock()  # tokenizers must not be encoding and decoding at one time

        def encode(text: str) -> list[int]:
            with lock:
                return tokenizer(text)["input_ids"]

        def decode(ids: list[int], skip_special: bool) -> str:
            with lock:
                return tokenizer.decode(ids, skip_special_tokens=skip_special)

        return Limits(
            vocab_size=config.vocab_size,
            context_length=wanted or own,
            eos_token_ids=frozenset(ids - {None}),
            encode=encode,
            decode=decode,
        )

    def _identity(self, model: Any) -> Identity:
        path = os.path.abspath(os.path.expanduser(self.config.model.path))
        architectures = model.config.architectures or [type(model).__name__]
        return Identity(path, path, model.config.model_type, list(architectures))

    def _entry(self, app: App) -> dict[str, Any]:
        """Return what stands in the name registry."""
        about = app.describe()
        names = ("model_path", "model_type", "architectures", "vocab_size", "context_length")
        return {
            "address": self.address,
            "type": "embedded",
            **{name: about[name] for name in names},
            "version": about["weight_version"],
            "host": self.config.cluster.host,
            "pid": os.getpid(),
        }


def _notify(generations: list[Generation]) -> None:
    for generation in generations:
        generation.notify()
