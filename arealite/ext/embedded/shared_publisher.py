"""Publishes without a copy: a server in the trainer's process uses the trained parameters.

For one GPU, or a laptop: memory holds one set of parameters instead of two, and generation and
training alternate. The server runs in a thread. The trainer's thread pauses it while the parameters
change.
"""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import GenerationConfig

from arealite.api.engine import TrainEngine
from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.api.llm_server import LLMServerConfig
from arealite.api.publisher import PolicyProof, PublishReport, WeightPublisher
from arealite.base import log
from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.ext.embedded.config import EmbeddedServerConfig
from arealite.ext.embedded.embedded_server import EmbeddedServer
from arealite.impl.http_client import Pool
from arealite.impl.publisher.control import control_of
from arealite.impl.publisher.loop_thread import LoopThread
from arealite.impl.publisher.servers import PROOF_S
from arealite.system.health.waits import Wait
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)


class SharedPublisher(WeightPublisher):
    """Version k is served from `stage` of k until the next `pause_generation`."""

    def __init__(self, config: ExperimentConfig, engine: TrainEngine) -> None:
        """Start the server, paused.

        Raises:
            UserError: The engine's parameters, the model or the port cannot be used.
        """
        module = engine.whole_module
        if module is None:
            raise UserError(
                "trainer.ppo.publisher.type=shared generates from the trained parameters, "
                "so they must not be sharded, and must have the dtype of the forward pass: "
                "use one trainer rank, engine.fsdp.dtype=float32 or lora.rank above 0, "
                "and cpu_offload=false."
            )
        with suppress(OSError):  # no generation config: config.json has the end tokens
            folder = Path(config.model.path).expanduser()
            module.generation_config = GenerationConfig.from_pretrained(folder)
        self.config = config.trainer.ppo.publisher
        self._names = NameRegistry.of(config)
        self.server = EmbeddedServer(_server_config(config), shared=module)
        self._ready: Future[None] = Future()
        self._pause_s = 0.0
        self._stall_s = 0.0
        self._thread = LoopThread("server", self._serve)
        self._await("the server to listen", self._ready)
        self._paused_at = time.perf_counter()

    # ------------------------------------------------------------ called by the trainer

    def pause_generation(self) -> None:
        begin = time.perf_counter()
        self._await("generation to pause", self.server.pause(self.config.pause_mode))
        self._paused_at = time.perf_counter()
        self._pause_s = self._paused_at - begin

    def stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Continue generation with the current parameters; `weights` is not used.

        Raises:
            InvariantError: The server generates from other parameters.
        """
        self._await("generation to continue", self.server.resume(str(version)))
        self._stall_s = time.perf_counter() - self._paused_at
        if self.proof is not None:
            self._prove(self.proof, version)
        return False

    def _prove(self, proof: PolicyProof, version: int) -> None:
        """Compare the server's scores, unless it has a long queue.

        This runs in `stage`, because nobody pauses the server meanwhile.
        """
        proving = asyncio.run_coroutine_threadsafe(self._fault(proof, version), self._thread.loop)
        with suppress(TimeoutError):
            fault = proving.result(PROOF_S)
            if fault:
                raise InvariantError(f"the server in the trainer's process: {fault}")
        proving.cancel()

    async def _fault(self, proof: PolicyProof, version: int) -> str:
        """Return why the server generates from other parameters; "" without a fault."""
        with closing(Pool(self.config.timeout_s)) as pool:
            server = control_of(
                {"address": self.server.address},
                id=self.server.entry_id,
                pool=pool,
                headers=self._names.headers("shared"),
            )
            return await proof.fault(server.id, version, server.generate)

    def push(self, version: int) -> PublishReport:
        logger.info("weights published", version=version, servers=1, stall_s=self._stall_s)
        return PublishReport(version=version, pause_s=self._pause_s, stall_s=self._stall_s)

    @property
    def needs_republish(self) -> bool:
        """Always False; raises if the server crashed, because its requests get no answer."""
        if self._thread.ended.done():
            raise self._thread_error()
        return False

    def close(self) -> None:
        self._thread.stop(partial(self.server.stop, None), self.config.timeout_s)

    # ------------------------------------------------------------ internals

    def _await(self, event: str, done: Future[None]) -> None:
        """Wait for the server's thread.

        Raises:
            UserError: The server could not start.
            RoleError: The server crashed, or the wait is longer than `timeout_s`.
        """
        seconds = self.config.timeout_s
        with Wait(event=event, owner="publisher", on="trainer-0", seconds=seconds):
            completed, _ = wait([done, self._thread.ended], seconds, FIRST_COMPLETED)
        if not completed:
            raise RoleError(f"waited {seconds:g} s for {event}")
        if done not in completed:
            raise self._thread_error()
        done.result()

    def _thread_error(self) -> Exception:
        error = self._thread.ended.exception()
        if isinstance(error, UserError | RoleError):
            return error
        return RoleError(f"the server in the trainer's process ended: {error!r}")

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.server.serve(), name="serve")
            await self.server.ready.wait()
            self._ready.set_result(None)


def _server_config(config: ExperimentConfig) -> ServerConfig:
    """Return the config of the server in the trainer's process."""
    embedded = EmbeddedServerConfig(
        max_running_requests=config.trainer.ppo.publisher.shared.max_running_requests,
        num_threads=config.launcher.trainer_threads,
    )
    return ServerConfig(
        experiment_name=config.experiment_name,
        trial_name=config.trial_name,
        seed=config.seed,
        cluster=config.cluster,
        model=config.model,
        llm_server=replace(LLMServerConfig(host=config.cluster.bound), embedded=embedded),
    )
