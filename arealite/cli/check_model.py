"""`arealite check --model`: the self-check without a run, on this machine with one rank."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory

from arealite.api.config import ExperimentConfig, ServerConfig
from arealite.base.errors import UserError
from arealite.base.model_folder import read_model
from arealite.cli import configs
from arealite.cli.fold import fold
from arealite.impl.self_check.check import SelfCheck
from arealite.impl.self_check.template import check_template
from arealite.impl.server.embedded import EmbeddedServer
from arealite.impl.trainer.components import make_engine
from arealite.impl.trainer.world import World

HOST = "127.0.0.1"


def main(argv: Sequence[str]) -> int:
    """Compare the programs that compute the model of a run; return 1 if two of them differ."""
    description = "Compare the trainer with an embedded server and with plain transformers."
    config = configs.parse(
        ExperimentConfig, argv, command="arealite check", description=description
    )
    read_model(config.model.path)
    world = World.init(threads=config.launcher.trainer_threads, seed=config.seed)
    with TemporaryDirectory() as names:
        cluster = replace(config.cluster, name_root=names, host=HOST, security=False)
        own = replace(configs.own_server(config), cluster=cluster)
        lines = [f"template   warning: {fault}" for fault in check_template(config)]
        check = SelfCheck(replace(config, cluster=cluster), make_engine(config), world, 0)
        faults = asyncio.run(_compare(check, own))
    world.destroy()
    lines += [f"compared   {other}: {text}" for other, text in check.found.items()]
    print(*map(fold, [*lines, *(f"fault      {fault}" for fault in faults)]), sep="\n")
    print("not ok" if faults else "ok: the trainer computes what the others compute")
    return int(bool(faults))


async def _compare(check: SelfCheck, served: ServerConfig) -> list[str]:
    """Return the errors of the comparisons, also with an embedded server if one is configured."""

    def compare() -> list[str]:
        return [check.refusal(each) for each in check.compare() if not each.is_equal]

    if served.llm_server.type != "embedded":
        check.found["server"] = f"{served.llm_server.type} is compared at the start of each run"
        return await asyncio.to_thread(compare)
    server = EmbeddedServer(
        replace(served, llm_server=replace(served.llm_server, host=HOST, port=0))
    )
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
