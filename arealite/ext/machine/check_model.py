"""`arealite check --model`: the self-check without a run, on this machine with one rank."""

import asyncio
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from arealite.api.engine import Training
from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base.printable import fold
from arealite.cli import configs
from arealite.ext.embedded.embedded_server import EmbeddedServer
from arealite.ext.self_check.check import SKIPPED, SelfCheck
from arealite.ext.self_check.template import check_template
from arealite.ext.weights.checksums import check_finite
from arealite.impl.trainer.base import make_engine
from arealite.impl.trainer.rank_group import World

HOST = "127.0.0.1"


def main(config: ExperimentConfig) -> int:
    """Compare trainer, embedded server and plain transformers; return 1 if the trainer differs."""
    world = World.init(threads=config.launcher.trainer_threads, seed=config.seed, is_alone=True)
    with TemporaryDirectory() as temp:
        cluster = replace(config.cluster, name_root=temp, host=HOST, security=False)
        server_config = replace(configs.own_server(config), cluster=cluster)
        warnings = check_template(config)
        engine = make_engine(
            config,
            training=Training(optimizer=config.trainer.ppo.optimizer, lr=0.0, total_updates=1),
        )
        check = SelfCheck(replace(config, cluster=cluster), engine, world, 0)
        check_finite(check.module, config.model.path)
        if config.model.adapter:
            engine.export(Path(temp) / "merged")
            merged = replace(server_config.model, path=f"{temp}/merged")
            server_config = replace(server_config, model=merged)
        faults = asyncio.run(_compare(check, server_config))
    world.destroy()
    for warning in warnings:
        print(fold(f"template   warning: {warning}"))
    for other, comparison in check.outcomes.items():
        print(fold(f"compared   {other}: {comparison}"))
    for fault in faults:
        print(fold(f"fault      {fault}"))
    if faults:
        print("not ok")
    elif check.skipped < check.outcomes.keys():
        print("ok: the trainer's log-probabilities are within the bounds")
    else:
        print("nothing was compared")
    return 1 if faults else 0


async def _compare(check: SelfCheck, served: ServerConfig) -> list[str]:
    """Return the errors of the comparisons; start an embedded server if llm_server.type is it."""
    if served.llm_server.type != "embedded":
        check.outcomes["server"] = f"{SKIPPED}: each run compares {served.llm_server.type} itself"
        return await asyncio.to_thread(check.faults)
    llm_server = replace(served.llm_server, host=HOST, port=0)
    server = EmbeddedServer(replace(served, llm_server=llm_server))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        await server.ready.wait()
        await asyncio.wrap_future(server.resume("0"))
        faults = await asyncio.to_thread(check.faults)
        server.stop(None)
    return faults
