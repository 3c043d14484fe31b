"""`arealite role NAME INDEX RUN`: run one process of a run.

Each role imports only its own parts: the datapipe starts without torch.
"""

import argparse
import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.base import log, outputs
from arealite.base.signals import STOP
from arealite.base.trial_files import RunPaths
from arealite.cli import configs
from arealite.ext.warm_start import parent
from arealite.impl.launcher.processes import die_with_parent
from arealite.system.health import vitals
from arealite.system.locks import lock_file
from arealite.system.names.name_registry import NameRegistry


def main(argv: Sequence[str]) -> int:
    """Run the role named on the command line until it ends."""
    parser = argparse.ArgumentParser(prog="arealite role")
    parser.add_argument("role", choices=list(ROLES))
    parser.add_argument("index", type=int)
    parser.add_argument("run", type=Path)
    options = parser.parse_args(argv)
    die_with_parent()
    config = configs.load_run(RunPaths(options.run).config)
    return run(options.role, options.index, config)


def run(role: str, index: int, config: ExperimentConfig) -> int:
    """Set up logging and run one role of `config`."""
    config = configs.resolve_host(config)
    outputs.protect()
    outputs.log_to(run_paths(config).logs / f"{role}-{index}.log")
    log.setup(f"{role}-{index}", config.logger.level)
    vitals.start(f"{role}-{index}", name_dir(config) / "vitals")
    ROLES[role](config, index)
    return 0


def datapipe(config: ExperimentConfig, index: int) -> None:
    """Serve tasks, leases and batches until the trainer finishes."""
    from arealite.system.data.tasks import load_split
    from arealite.system.datapipe.datapipe import Datapipe

    pipe = Datapipe(
        config=config,
        train=load_split(config, "train"),
        eval=load_split(config, "eval"),
        registry=NameRegistry.of(config),
        address=f"tcp://{config.cluster.host}:0",
    )
    parent.freeze()
    with lock_file(run_paths(config).root / ".datapipe.lock", fix="One run has one datapipe."):
        asyncio.run(until_terminated(with_externals(config, pipe.run())))


async def with_externals(
    config: ExperimentConfig, work: Coroutine[object, object, None], *, updates: bool = True
) -> None:
    """Await `work`; meanwhile keep the name entries of the external servers up to date."""
    if not config.llm_server.addresses:
        await work
        return
    from arealite.ext.external.external_servers import ExternalServers  # imports aiohttp

    async with asyncio.TaskGroup() as tasks:
        servers = ExternalServers(config, updates=updates)
        externals = tasks.create_task(servers.run(), name="external servers")
        await work
        externals.cancel()


async def until_terminated(work: Coroutine[object, object, None]) -> None:
    """Await `work`; SIGTERM cancels it, so that it can remove its name entry."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    vitals.watch(loop)
    loop.add_signal_handler(STOP, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def rollout(config: ExperimentConfig, index: int) -> None:
    """Run episodes until the datapipe drains the worker."""
    import uvloop

    from arealite.api.agent import load_tokenizer
    from arealite.api.llm import clients
    from arealite.impl.rollout.worker import RolloutWorker
    from arealite.system.links.worker_link import WorkerLink

    collector = config.trainer.ppo.collector
    names = NameRegistry.of(config)
    link = WorkerLink(
        resolve=lambda: names.address("datapipe"),
        worker_id=f"rollout-{index}@{socket.gethostname()}",
        capacity=collector.concurrency,
        secret=names.secret,
        max_frame_mb=config.datapipe.max_frame_mb,
    )
    worker = RolloutWorker(
        config,
        link=link,
        client=clients.get(collector.client.type)(config, collector.client),
        tokenizer=load_tokenizer(config.model.path),
    )
    parent.freeze()
    gc.set_threshold(50_000)  # reference counting frees nearly all objects of an episode
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        vitals.watch(runner.get_loop())
        runner.run(worker.run())


def trainer(config: ExperimentConfig, index: int) -> None:
    """Train as one rank."""
    from arealite.api.trainer import trainers

    trainers.get(config.trainer.type)(config).train()


def sidecar(config: ExperimentConfig, index: int) -> None:
    """Supervise the other roles of a run under torchrun."""
    from arealite.ext.clusters.torchrun import Sidecar

    sys.exit(Sidecar(config).run())


ROLES: dict[str, Callable[[ExperimentConfig, int], None]] = {
    role.__name__: role for role in (datapipe, rollout, trainer, sidecar)
}
