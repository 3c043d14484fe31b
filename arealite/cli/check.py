"""Everything that can be found wrong before a run starts, found before anything is started.

Each check raises UserError with one line that names the fix; cheap checks come first.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, cast

from arealite.api.config import ExperimentConfig, ServerConfig, name_dir, run_paths
from arealite.api.env import Env, envs
from arealite.api.llm_server import servers
from arealite.api.logger import loggers
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig
from arealite.base.config import check_constraints
from arealite.base.errors import DeadlineError, UserError
from arealite.base.model_folder import (
    check_layers,
    check_logits,
    exact_length,
    other_model,
    read_model,
    vocab_size,
)
from arealite.base.places import check_address, check_folder
from arealite.cli import configs
from arealite.cli.check_data import check_first_rows, check_prompts, check_rows, check_tensor_names
from arealite.cli.resume import check_resume
from arealite.impl.env_client import make_env
from arealite.impl.launcher.processes import server_overrides
from arealite.impl.rollout.collector import check_seats
from arealite.system.data.dataset import identity
from arealite.system.data.tasks import load_split, shares
from arealite.system.datapipe.curriculum import Curriculum
from arealite.system.names.registry import Entry, NameRegistry

MIN_FREE_BYTES = 64 << 20


def check(config: ExperimentConfig, *, has_servers: bool = True) -> None:
    """Check the name registry, numbers, names, files, dataset and server of an experiment, in this
    order.

    `has_servers` False: none needs to be there yet.
    """
    NameRegistry.of(config).check()
    check_options(config)
    model = check_model(config.model.path)
    if config.trainer.type != "reward":
        check_logits(model, config.model.path)
    check_run_folder(config)
    check_addresses(config)
    if config.trainer.is_offline:
        check_other_model(config.trainer.dpo.reference, model, key="trainer.dpo.reference")
        check_resume(config, check_rows(config, model))
        return
    if config.trainer.ppo.publisher.type != "shared":
        check_tensor_names(config.model.path)
    if serves_itself(config) and own_server(config).llm_server.type == "embedded":
        check_layers(model, config.model.path)
    check_data(config)
    check_first_rows(config)
    tasks, held_out = load_split(config, "train"), load_split(config, "eval")
    check_size(config, tasks)
    if config.datapipe.curriculum.by:
        Curriculum(config, tasks)
    check_other_models(config.trainer.ppo, model)
    check_resume(config, identity(config, tasks))
    is_served = has_servers and not serves_itself(config)
    contexts = check_servers(config, model) if is_served else own_contexts(config, model)
    check_prompts(config, [*tasks, *held_out], contexts)


def check_options(config: ExperimentConfig) -> None:
    """Check names, and numbers together, which needs no file."""
    trainer = config.trainer
    check_names(config)
    if trainer.is_offline:
        check_constraints(trainer.sft, "trainer.sft.")
        return
    check_constraints(trainer.ppo, "trainer.ppo.")
    check_constraints(config.datapipe, "datapipe.")
    if trainer.type == "ppo" and trainer.ppo.max_staleness != 0:
        raise UserError(
            f"trainer.type=ppo is synchronous, but max_staleness is {trainer.ppo.max_staleness}. "
            "Use trainer.ppo.max_staleness=0, or trainer.type=async_ppo."
        )
    check_shared(config)
    check_parts(config)
    check_scaling(config)


def required(value: str | None, key: str) -> str:
    """Return `value`, or refuse that `key` is missing."""
    if not value:
        or_made = f", or {key}=generated" if key.startswith("dataset.") else ""
        raise UserError(f"{key} is not set. Give {key}=PATH{or_made}.")
    return value


def check_names(config: ExperimentConfig) -> None:
    """Check that each `type` names a known part, and that the run's names can be folders."""
    name_dir(config)
    configs.check_names(config)
    for name in config.logger.types:
        loggers.get(name).check()


def check_shared(config: ExperimentConfig) -> None:
    """Check that a trainer that is to generate from its own parameters has them whole and alone."""
    ppo, ranks = config.trainer.ppo, config.launcher.trainer_ranks
    if ppo.publisher.type != "shared":
        return
    fsdp, key = ppo.engine.fsdp, "trainer.ppo.publisher.type=shared"
    if ranks > 1:
        raise UserError(f"{key} needs launcher.trainer_ranks=1, not {ranks}.")
    if config.llm_server.addresses or config.launcher.llm_servers:
        raise UserError(
            f"{key} updates no other server: remove llm_server.addresses and launcher.llm_servers."
        )
    if fsdp.cpu_offload or (fsdp.dtype != "float32" and not fsdp.lora.rank):
        raise UserError(
            f"{key} generates from the parameters that are trained: use engine.fsdp.dtype=float32, "
            "or lora.rank above 0, and cpu_offload=false."
        )


def check_model(path: str, key: str = "model.path") -> dict[str, Any]:
    """Return the config.json of the model that `key` names."""
    return read_model(required(path, key), key)


def check_other_models(ppo: PPOConfig, model: dict[str, Any]) -> None:
    """Check that a reference and a critic read the token ids that the policy writes."""
    check_other_model(ppo.kl.reference, model, key="trainer.ppo.kl.reference")
    check_other_model(ppo.critic.path, model, key="trainer.ppo.critic.path")


def check_other_model(path: str | None, model: dict[str, Any], *, key: str) -> None:
    """Check that the model at `path`, if `key` names one, has the vocabulary of `model`."""
    if path is None or path == "initial":
        return
    theirs, ours = vocab_size(check_model(path, key)), vocab_size(model)
    if theirs != ours:
        raise UserError(
            f"{key}={path} has another vocabulary: {theirs} token ids, model.path has {ours}. "
            "Give a model of the same family."
        )


def check_data(config: ExperimentConfig) -> None:
    """Check that the run says once where its tasks are from."""
    if not config.trainer.ppo.collector.envs:
        required(config.dataset.train, "dataset.train")
    elif config.dataset.train or config.dataset.eval or config.trainer.ppo.collector.seats:
        raise UserError(
            "collector.envs has several environments: set train, eval and seats in each of them "
            "(trainer.ppo.collector.envs.NAME.train=…), not dataset.train, dataset.eval and "
            "collector.seats."
        )


def check_parts(config: ExperimentConfig) -> None:
    """Check the names, shares and seats of a run's environments.

    Seats that only an environment itself knows are left to the workers.
    """
    collector, rows = config.trainer.ppo.collector, config.dataset.rows
    if bad := [name for name in collector.envs if not re.fullmatch(r"[A-Za-z0-9_-]+", name)]:
        raise UserError(f"collector.envs.{bad[0]}: use letters, digits, '_' and '-' only.")
    counts = shares({name: part.weight for name, part in collector.envs.items()}, rows)
    if none := [name for name, count in counts.items() if not count]:
        raise UserError(
            f"collector.envs.{none[0]}.weight={collector.envs[none[0]].weight:g} is no whole row "
            f"of dataset.rows={rows}. Raise one of them."
        )
    for part in collector.parts.values():
        if part.env.runtime.type != "in_process":
            make_env(config, part.env)  # checks `runtime.addresses` and `runtime.token_env`
        seats = getattr(envs.get(part.env.type), "seats", None)
        if isinstance(seats, tuple) and seats is not Env.seats:
            check_seats(part, cast(tuple[str, ...], seats))


def check_scaling(config: ExperimentConfig) -> None:
    """Check that launcher.max_workers fits the other options of scaling."""
    most, launcher = config.launcher.max_workers, config.launcher
    is_scaled = config.trainer.ppo.collector.autoscale.enabled
    if most and (most < launcher.rollout_workers or not is_scaled):
        raise UserError(
            f"launcher.max_workers={most} must be at least launcher.rollout_workers="
            f"{launcher.rollout_workers}, with collector.autoscale.enabled=true. 0 keeps that many."
        )


def check_addresses(config: ExperimentConfig) -> None:
    """Check that the roles that certainly run on this machine can listen at their addresses."""
    where, publisher = config.launcher.type, config.trainer.ppo.publisher
    if config.trainer.is_offline or where == "slurm":
        return
    if config.cluster.host != "auto":
        check_address(config.cluster.host, at="cluster")
    if where == "local" and publisher.type == "distributed":
        at, port = "trainer.ppo.publisher.distributed", publisher.distributed.port
        check_address(config.cluster.host, port, at=at)
    if where == "local" and config.launcher.llm_servers:
        server = own_server(config).llm_server
        servers.check(server.type)
        if server.port and config.launcher.llm_servers > 1:
            what = f"is one port for {config.launcher.llm_servers} servers"
            raise UserError(f"llm_server.port={server.port} {what}. Leave it out of server_args.")
        check_address(server.host, server.port, at="llm_server")


def check_size(config: ExperimentConfig, tasks: Sequence[Task]) -> None:
    """Check that one batch does not need a task twice."""
    ppo = config.trainer.ppo
    if len(tasks) < ppo.num_groups:
        raise UserError(
            f"{config.dataset.train or 'dataset.rows'} has {len(tasks)} rows, a batch needs "
            f"{ppo.num_groups} "
            f"(batch_size {ppo.batch_size} / group_size {ppo.collector.group_size}). "
            "Use a smaller batch_size or more rows."
        )


def check_run_folder(config: ExperimentConfig) -> int:
    """Check that the trial's folder can be made and written, leave nothing, return free bytes."""
    root = run_paths(config).root
    free = check_folder(root, "run folder", "cluster.run_root")
    if free < MIN_FREE_BYTES:
        raise UserError(
            f"the disk of run folder {root} has {free >> 20} MiB free, a run needs at least "
            f"{MIN_FREE_BYTES >> 20} MiB. Free some, or set cluster.run_root to another disk."
        )
    return free


def find_servers(config: ExperimentConfig, model: dict[str, Any]) -> list[Entry]:
    """Ask the external servers, if any, or wait for a live server of this trial."""
    names = NameRegistry.of(config)
    if config.llm_server.addresses:
        from arealite.impl.server import external  # imports aiohttp

        return [*external.examine(config, model), *names.list("llm_server")]
    if not names.list("llm_server"):
        print(f"waiting up to {config.server_wait_s:g} s for a language-model server", flush=True)
    wait = names.wait("llm_server", seconds=config.server_wait_s, owner="train.py")
    try:
        return asyncio.run(wait)
    except DeadlineError as error:
        raise UserError(
            f"no language-model server for {config.experiment_name}/{config.trial_name} within "
            f"{config.server_wait_s:g} s (looked in {name_dir(config)}). Start one: python3 "
            f"arealite/launch_llm_server.py experiment_name={config.experiment_name} "
            f"trial_name={config.trial_name} model.path={config.model.path}, or let the run start "
            "one: launcher.llm_servers=1"
        ) from error


def check_servers(config: ExperimentConfig, model: dict[str, Any]) -> list[int]:
    """Check who will generate; return the contexts they say they have."""
    servers = find_servers(config, model)
    for server in servers:
        if difference := other_model(server.value, model):
            raise UserError(
                f"the server at {server.value['address']}: {difference} Start it with "
                f"model.path={config.model.path}, or use another trial_name."
            )
    return [length for server in servers if (length := server.value.get("context_length"))]


def serves_itself(config: ExperimentConfig) -> bool:
    """Whether nobody else has to start a server."""
    return bool(config.trainer.ppo.publisher.type == "shared" or config.launcher.llm_servers)


def own_server(config: ExperimentConfig) -> ServerConfig:
    """Return the config of the servers that are started with this run."""
    file, words = configs.CONFIG_DIR / "llm_server.yaml", server_overrides(config)
    return configs.load(ServerConfig, file, words)


def own_contexts(config: ExperimentConfig, model: dict[str, Any]) -> list[int]:
    """Return the context that servers of this run will have, [] where the model tells none."""
    wanted = own_server(config).llm_server.context_length if config.launcher.llm_servers else None
    context = wanted or exact_length(model) or model.get("max_position_embeddings")
    return [context] if context else []
