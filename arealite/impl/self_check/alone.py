"""`arealite check --model`: the self-check without a run, on this machine with one rank."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from tempfile import TemporaryDirectory

from arealite.api.config import ExperimentConfig, ServerConfig
from arealite.base.errors import UserError
from arealite.impl.self_check.check import SelfCheck
from arealite.impl.server.embedded import EmbeddedServer
from arealite.impl.trainer.components import make_engine
from arealite.impl.trainer.world import World

HOST = "127.0.0.1"


def check_model(config: ExperimentConfig, served: ServerConfig | None) -> Iterator[tuple[str, str]]:
    """Compare the trainer with plain transformers and with an embedded server.

    Args:
        config: The experiment.
        served: The options of the server; None: no embedded server is configured.

    Yields:
        (the other program, the difference), then ("", the error) for each that is too large.
    """
    world = World.init(threads=config.launcher.trainer_threads, seed=config.seed)
    try:
        with TemporaryDirectory() as names:
            cluster = replace(config.cluster, name_root=names, host=HOST, security=False)
            if served is not None:
                own = replace(served.llm_server, host=HOST, port=0)
                served = replace(served, cluster=cluster, llm_server=own)
            check = SelfCheck(replace(config, cluster=cluster), make_engine(config), world, 0)
            yield from asyncio.run(_compare(check, served))
    finally:
        world.destroy()


async def _compare(check: SelfCheck, served: ServerConfig | None) -> list[tuple[str, str]]:
    def compare() -> list[tuple[str, str]]:
        made = check.compare()
        return [*check.found.items(), *(("", check.refusal(c)) for c in made if not c.is_equal)]

    if served is None:
        return await asyncio.to_thread(compare)
    server = EmbeddedServer(served)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve())
            await server.ready.wait()
            await asyncio.wrap_future(server.resume("0"))
            found = await asyncio.to_thread(compare)
            server.stop(None)
    except* UserError as group:
        raise group.exceptions[0] from None
    return found
