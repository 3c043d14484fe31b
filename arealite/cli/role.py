"""`arealite role NAME INDEX RUN`: run one process of a run.

Each role imports only its own parts: the datapipe starts without torch.
"""

import argparse
import asyncio
import contextlib
import gc
import socket
from collections.abc import Coroutine, Sequence
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.api.hooks import RoleMain
from arealite.base import entries, log, outputs
from arealite.base.files import lock_file
from arealite.base.signals import STOP
from arealite.base.trial_files import RunPaths
from arealite.cli import resolved
from arealite.impl.launcher.processes import die_with_parent, starters
from arealite.system.health import vitals
from arealite.system.names.name_registry import NameRegistry, with_externals

GROUP = "role"


def main(argv: Sequence[str]) -> int:
    """Run the role named on the command line until it ends."""
    parser = argparse.ArgumentParser(prog="arealite role")
    parser.add_argument("role", choices=[*entries.own(GROUP), *entries.installed(GROUP)])
    parser.add_argument("index", type=int)
    parser.add_argument("run", type=Path)
    options = parser.parse_args(argv)
    die_with_parent()
    config = resolved.load(ExperimentConfig, RunPaths(options.run).resolved)
    return run(options.role, options.index, config)


def run(role: str, index: int, config: ExperimentConfig) -> int:
    """Set up logging and run one role of `config`."""
    config = resolved.resolve_host(config)
    outputs.protect()
    outputs.log_to(run_paths(config).logs / f"{role}-{index}.log")
    log.setup(f"{role}-{index}", config.logger.level)
    vitals.start(f"{role}-{index}", name_dir(config) / "vitals")
    target = entries.find(GROUP, role)
    assert target is not None, role
    run_role: RoleMain = entries.load(target)
    run_role(config, index)
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
    starters().freeze()
    with lock_file(run_paths(config).root / ".datapipe.lock", fix="One run has one datapipe."):
        asyncio.run(until_terminated(with_externals(config, pipe.run())))


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
    starters().freeze()
    gc.set_threshold(50_000)  # reference counting frees nearly all objects of an episode
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        vitals.watch(runner.get_loop())
        runner.run(worker.run())


def trainer(config: ExperimentConfig, index: int) -> None:
    """Train as one rank."""
    from arealite.api.trainer import trainers

    trainers.get(config.trainer.type)(config).train()
