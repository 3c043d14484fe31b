"""Publishes without moving a byte: an embedded server in the trainer's process generates from the
parameters that are trained.

For one GPU, or a laptop: one set of parameters instead of two, for generation and training that
take turns. A thread serves; the trainer's own holds it while it changes the parameters.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from arealite.api.config import ExperimentConfig, ServerConfig
from arealite.api.engine import TrainEngine
from arealite.api.llm_server import EmbeddedServerConfig, LLMServerConfig
from arealite.api.publisher import PublishReport, WeightPublisher
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.impl.server.embedded import EmbeddedServer
from arealite.system.health.vitals import watch
from arealite.system.health.waits import Wait

logger = log.get(__name__)


class SharedPublisher(WeightPublisher):
    """Version k is served from `release` of k on, until the trainer holds it again."""

    def __init__(self, config: ExperimentConfig, engine: TrainEngine) -> None:
        """Serve, held, before this returns.

        Raises:
            UserError: the engine's parameters, the model or the port cannot be used.
        """
        module: Any = getattr(engine, "module", None)
        if module is None or any(isinstance(p, DTensor) for p in module.parameters()):
            raise UserError(
                "trainer.ppo.publisher.type=shared generates from the very parameters that are "
                "trained, so they must be whole and of the compute's dtype: one trainer rank, "
                "engine.fsdp.dtype=float32 or lora.rank above 0, cpu_offload=false."
            )
        with suppress(OSError):  # few models have none; then the config's end tokens hold
            folder = Path(config.model.path).expanduser()
            module.generation_config = GenerationConfig.from_pretrained(folder)
        self.config, threads = config.trainer.ppo.publisher, config.launcher.trainer_threads
        rows = self.config.shared.max_running_requests
        served = ServerConfig(
            experiment_name=config.experiment_name,
            trial_name=config.trial_name,
            seed=config.seed,
            cluster=config.cluster,
            model=config.model,
            llm_server=LLMServerConfig(
                host=config.cluster.bound,
                embedded=EmbeddedServerConfig(max_running_requests=rows, num_threads=threads),
            ),
        )
        self.server = EmbeddedServer(served, shared=module)
        self._loop = asyncio.new_event_loop()
        self._serving: Future[None] = Future()
        """Ends with the server: with its error, if it died."""
        self._ready: Future[None] = Future()
        self._pause_s = self._stall_s = 0.0
        # A thread begins with an empty context, and the log's role is in the context.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="server", daemon=True)
        self._thread.start()
        self._await("the server to listen", self._ready)
        self._held_at = time.perf_counter()

    # ------------------------------------------------------------ called by the trainer

    def hold(self) -> None:
        begin = time.perf_counter()
        self._await("generation to stand still", self.server.hold(self.config.pause_mode))
        self._held_at = time.perf_counter()
        self._pause_s = self._held_at - begin

    def stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Serve what the parameters hold now; `weights`, which would copy them, is left alone."""
        self._await("generation to go on", self.server.release(str(version)))
        self._stall_s = time.perf_counter() - self._held_at
        return False

    def push(self, version: int) -> PublishReport:
        logger.info("weights published", version=version, servers=1, stall_s=self._stall_s)
        return PublishReport(version, pause_s=self._pause_s, stall_s=self._stall_s)

    @property
    def starving(self) -> bool:
        """Never; but this is asked while the trainer waits for what a dead server never gives."""
        if self._serving.done():
            raise self._death()
        return False

    def close(self) -> None:
        if self._thread.is_alive():
            with suppress(RuntimeError):  # its loop is closed already
                self._loop.call_soon_threadsafe(self.server.stop, None)
            self._thread.join(self.config.timeout_s)

    # ------------------------------------------------------------ inside

    def _await(self, what: str, done: Future[None]) -> None:
        """Wait for the server's thread, no longer than it lives.

        Raises:
            UserError: it could not begin.
            RoleError: it died, or takes longer than `timeout_s`.
        """
        seconds = self.config.timeout_s
        with Wait(what, owner="publisher", on="trainer-0", seconds=seconds):
            ended = wait([done, self._serving], seconds, FIRST_COMPLETED).done
        if done not in ended:
            raise self._death() if ended else RoleError(f"waited {seconds:g} s for {what}")
        done.result()

    def _death(self) -> Exception:
        error = self._serving.exception()
        if isinstance(error, UserError | RoleError):
            return error
        return RoleError(f"the server in the trainer's process ended: {error!r}")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001  (crosses to the trainer's thread)
            grouped = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
            self._serving.set_exception(grouped[0])
        else:
            self._serving.set_result(None)

    async def _serve(self) -> None:
        watch(self._loop)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.server.serve(), name="serve")
            await self.server.ready.wait()
            self._ready.set_result(None)
