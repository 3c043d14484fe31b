"""The checks that each start makes before it starts a process.

`preflight` runs all checks, cheap ones first. Each check raises UserError with one line that names
the fix. Rules between options are in the method `constraints` of the config class; rules about
files are beside the functions that read the files. Extensions add checks by hooks (api/hooks.py).
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from arealite.api.env import Env, EnvConfig, envs, make_env
from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.api.fields import Package, PublisherOptions
from arealite.api.hooks import (
    ModelCheck,
    ModuleCheck,
    RunCheck,
    RunFacts,
    RunPackages,
    ServerFinder,
)
from arealite.api.llm_server import servers
from arealite.api.offline import offline_run
from arealite.api.publisher import publishers
from arealite.api.trainer import trainers
from arealite.base import entries, model_folder
from arealite.base.config_tree import check_constraints
from arealite.base.errors import DeadlineError, UserError
from arealite.base.extras import check_installed
from arealite.base.folder_checks import check_address, check_folder
from arealite.base.printable import fold
from arealite.cli import configs
from arealite.cli.resume import check_resume
from arealite.impl.rollout.collector import check_seats
from arealite.system.data.dataset import identity, make_sampler
from arealite.system.data.tasks import (
    check_first_rows,
    load_split,
    shares,
)
from arealite.system.names.name_registry import Entry, NameRegistry

MIN_FREE_BYTES = 64 << 20


def print_row(heading: str, line: str) -> None:
    """Print a line of a report, with its heading in the first column."""
    print(fold(f"{heading:<10} {line}"), flush=True)


def preflight(config: ExperimentConfig, *, has_servers: bool = True) -> RunFacts:
    """Run all checks of an experiment.

    Args:
        config: The experiment.
        has_servers: Whether separately started servers must be running now.

    Raises:
        UserError: A check failed.
    """
    NameRegistry.of(config).check()
    check_options(config)
    model, shapes = check_model_folder(config)
    free_bytes = check_run_folder(config)
    check_addresses(config)
    if config.view.web:
        check_address("127.0.0.1", config.view.port, at="view")
    facts = RunFacts(model=model, shapes=shapes, free_bytes=free_bytes)
    if config.trainer.is_offline:
        facts = _check_offline_data(config, facts)
    else:
        facts = _check_tasks_and_servers(config, facts, has_servers=has_servers)
    _check_with_hooks(config, facts)
    return facts


def _check_with_hooks(config: ExperimentConfig, facts: RunFacts) -> None:
    """Run the checks of extensions; print their warnings."""
    checks: list[RunCheck] = entries.hooks("check")
    for check in checks:
        for heading, warning in check(config, facts):
            print_row(heading, f"warning: {warning}")


def _check_offline_data(config: ExperimentConfig, facts: RunFacts) -> RunFacts:
    """Check the rows and the folder of an offline trainer's run; return all facts."""
    checked = offline_run(config.trainer.type).check_rows(config, facts.model)
    if checked.untrained:
        num_skipped = len(checked.untrained)
        print(
            fold(
                f"{num_skipped} rows have no tokens to train and are skipped; "
                f"the first: {checked.untrained[0]}"
            )
        )
    if checked.unread:
        print_row("data", f"not read, and without effect: {checked.unread}")
    check_resume(config, checked.identity)
    return replace(facts, num_rows=int(checked.identity["dataset_rows"]))


def _check_tasks_and_servers(
    config: ExperimentConfig, facts: RunFacts, *, has_servers: bool
) -> RunFacts:
    """Check the tasks, folder, servers and prompts of a PPO run; return all facts."""
    ppo = config.trainer.ppo
    model = facts.model
    check_sources(config)
    check_first_rows(config)
    train_tasks = load_split(config, "train")
    eval_tasks = load_split(config, "eval")
    _check_batch_size(config, len(train_tasks))
    make_sampler(config, train_tasks)
    model_folder.check_vocabulary(ppo.kl.reference, model, key="trainer.ppo.kl.reference")
    model_folder.check_vocabulary(ppo.critic.path, model, key="trainer.ppo.critic.path")
    check_resume(config, identity(config, train_tasks))
    servers_now = list[Entry]()
    if has_servers and not is_self_served(config):
        servers_now = find_servers(config, model)
    return replace(
        facts,
        train_tasks=train_tasks,
        eval_tasks=eval_tasks,
        contexts=contexts(config, model, servers_now),
        addresses=[str(server.value["address"]) for server in servers_now],
    )


def _check_batch_size(config: ExperimentConfig, num_tasks: int) -> None:
    """Check that the training tasks are enough for a batch."""
    ppo = config.trainer.ppo
    if num_tasks < ppo.num_groups:
        source = config.dataset.train or "dataset.rows"
        raise UserError(
            f"{source} has {num_tasks} rows, a batch needs {ppo.num_groups} "
            f"(batch_size {ppo.batch_size} / group_size {ppo.collector.group_size}). "
            "Use a smaller batch_size or more rows."
        )


def check_model_folder(config: ExperimentConfig) -> tuple[dict[str, Any], model_folder.Shapes]:
    """Check the model's files, and the options that depend on them; see read_model."""
    model, shapes = model_folder.read_model(required(config.model.path, "model.path"))
    checks: list[ModelCheck] = entries.hooks("model_check")
    for check in checks:
        check(config, model, shapes)
    return model, shapes


def check_tensors(config: ExperimentConfig) -> None:
    """Compare the folder's tensors with the model of its config.json, and run further checks.

    It imports torch, which takes seconds, so a run leaves it to the trainer.

    Raises:
        UserError: transformers cannot build the model, or a tensor or a target has no counterpart.
    """
    from arealite.impl.engine import loading
    from arealite.impl.weights.tensor_names import TensorNames

    head = trainers.get(config.trainer.type).head
    folder = Path(config.model.path).expanduser()
    model = loading.empty_model(folder, head)
    TensorNames(model, folder)
    checks: list[ModuleCheck] = entries.hooks("module_check")
    for check in checks:
        check(config, model, head)


def required(value: str | None, key: str) -> str:
    """Return the value of option `key`.

    Raises:
        UserError: The value is empty.
    """
    if not value:
        generated = f", or {key}=generated" if key.startswith("dataset.") else ""
        raise UserError(f"{key} is not set. Set {key}=PATH{generated}.")
    return value


# ------------------------------------------------------------ options


def check_options(config: ExperimentConfig) -> None:
    """Check names and the constraints between options, without reading files."""
    configs.check_names(config)
    check_training_packages(config)
    if config.trainer.is_offline:
        offline_run(config.trainer.type).check_options(config)
        return
    check_constraints(config, "")
    check_envs(config)


def check_envs(config: ExperimentConfig) -> None:
    """Check the weights, addresses and seats of a run's environments.

    If an environment determines its seats at run time, the workers check them.
    """
    _check_weights(config)
    for part in config.trainer.ppo.collector.parts.values():
        env_class: object = envs.get(part.env.type)
        seats = getattr(env_class, "seats", None)
        if part.env.runtime.type != "in_process":
            make_env(config, part.env)  # checks `runtime.addresses` and `runtime.token_env`
        elif getattr(env_class, "has_own_agents", False):
            env = make_env(config, part.env)  # checks its agents
            seats = getattr(env, "seats", None)
        if seats and isinstance(seats, tuple) and seats is not Env.seats:
            check_seats(part, cast(tuple[str, ...], seats))


def _check_weights(config: ExperimentConfig) -> None:
    """Check that each environment of collector.envs gets a row of dataset.rows."""
    num_rows = config.dataset.rows
    env_parts = config.trainer.ppo.collector.envs
    weights = {name: part.weight for name, part in env_parts.items()}
    for name, num_env_rows in shares(weights, num_rows).items():
        if not num_env_rows:
            raise UserError(
                f"collector.envs.{name}.weight={weights[name]:g} is less than one row of "
                f"dataset.rows={num_rows}. Raise one of them."
            )


def check_sources(config: ExperimentConfig) -> None:
    """Check that the tasks have exactly one source: dataset or collector.envs."""
    dataset = config.dataset
    collector = config.trainer.ppo.collector
    if not collector.envs:
        required(dataset.train, "dataset.train")
    elif dataset.train or dataset.eval or collector.seats:
        raise UserError(
            "collector.envs has several environments: set train, eval and seats of each of them "
            "(trainer.ppo.collector.envs.NAME.train=…), "
            "not dataset.train, dataset.eval and collector.seats."
        )


# ------------------------------------------------------------ this host


def check_run_folder(config: ExperimentConfig) -> int:
    """Check that the trial's folder can be created and written; return the free bytes."""
    root = run_paths(config).root
    free_bytes = check_folder(root, "run folder", "cluster.run_root")
    if free_bytes < MIN_FREE_BYTES:
        raise UserError(
            f"the disk of run folder {root} has {free_bytes >> 20} MiB free, "
            f"a run needs at least {MIN_FREE_BYTES >> 20} MiB. "
            "Free some, or set cluster.run_root to another disk."
        )
    return free_bytes


def check_addresses(config: ExperimentConfig) -> None:
    """Check that the roles of this host can listen at their addresses."""
    launcher = config.launcher
    publisher = config.trainer.ppo.publisher
    if config.trainer.is_offline or launcher.type == "slurm":
        return
    if config.cluster.host != "auto":
        check_address(config.cluster.host, at="cluster")
    if launcher.type != "local":
        return
    options = publishers.options(publisher)
    if isinstance(options, PublisherOptions):
        options.check_host(config.cluster.host)
    if launcher.llm_servers:
        server = configs.own_server(config).llm_server
        servers.check(server.type)
        if server.port and launcher.llm_servers > 1:
            raise UserError(
                f"llm_server.port={server.port} is one port for {launcher.llm_servers} servers. "
                "Remove it from server_args."
            )
        check_address(server.host, server.port, at="llm_server")


# ------------------------------------------------------------ servers


def is_self_served(config: ExperimentConfig) -> bool:
    """Return whether the run starts its servers or needs none."""
    options = publishers.options(config.trainer.ppo.publisher)
    needs_servers = not isinstance(options, PublisherOptions) or options.needs_servers
    return not needs_servers or config.launcher.llm_servers > 0


def find_servers(config: ExperimentConfig, model: dict[str, Any]) -> list[Entry]:
    """Return the external servers and those of this trial; wait for the first if there is none.

    Raises:
        UserError: There is no server within `server_wait_s`, or one has another model.
    """
    try:
        entries = _wait_for_servers(config, model)
    except DeadlineError as error:
        experiment = config.experiment_name
        trial = config.trial_name
        raise UserError(
            f"no language-model server for {experiment}/{trial} "
            f"within {config.server_wait_s:g} s (looked in {name_dir(config)}). "
            f"Start one: python3 arealite/launch_llm_server.py experiment_name={experiment} "
            f"trial_name={trial} model.path={config.model.path}, "
            "or let the run start one: launcher.llm_servers=1"
        ) from error
    for entry in entries:
        difference = model_folder.model_difference(entry.value, model)
        if difference:
            raise UserError(
                f"the server at {entry.value['address']}: {difference} "
                f"Start it with model.path={config.model.path}, or use another trial_name."
            )
    return entries


def _wait_for_servers(config: ExperimentConfig, model: dict[str, Any]) -> list[Entry]:
    """Return the entries of all servers that the run can use.

    Raises:
        DeadlineError: There is no server within `server_wait_s`.
    """
    names = NameRegistry.of(config)
    registered = names.list("llm_server")
    found_servers = list[Entry]()
    finders: list[ServerFinder] = entries.hooks("server_finder")
    for find in finders:
        found_servers += find(config, model)
    if found_servers:
        return [*found_servers, *registered]
    wait_s = config.server_wait_s
    if not registered:
        print(f"waiting up to {wait_s:g} s for a language-model server", flush=True)
    return asyncio.run(names.wait("llm_server", seconds=wait_s, owner="train.py"))


def contexts(
    config: ExperimentConfig, model: dict[str, Any], entries: Sequence[Entry]
) -> list[int]:
    """Return the context lengths that are known.

    Args:
        config: The run.
        model: config.json of the model.
        entries: The servers that run already; []: the run starts its own servers.
    """
    if entries:
        lengths = [entry.value.get("context_length") for entry in entries]
        return [length for length in lengths if length]
    length = 0
    if config.launcher.llm_servers:
        length = configs.own_server(config).llm_server.context_length
    length = length or model_folder.exact_length(model) or model.get("max_position_embeddings")
    return [length] if length else []


def check_training_packages(config: ExperimentConfig) -> None:
    """Check the optional modules that the processes of a training run import.

    Raises:
        UserError: A module is not installed.
    """
    hooks: list[RunPackages] = entries.hooks("packages")
    for packages_of in hooks:
        for package in packages_of(config):
            check_installed(package.module, package.requirement, package.option)
    if not config.trainer.is_offline:
        check_sampling_packages(config)


def check_sampling_packages(config: ExperimentConfig) -> None:
    """Check the optional modules that the environments and servers of a run import.

    Raises:
        UserError: A module is not installed.
    """
    collector = config.trainer.ppo.collector
    launcher = config.launcher
    for name, part in collector.parts.items():
        section = f"envs.{name}.env" if collector.envs else "env"
        if part.env.runtime.type in ("in_process", "subprocess"):  # else it is not imported here
            _check_env(part.env, f"trainer.ppo.collector.{section}")
    if launcher.llm_servers and launcher.type == "local":
        server = configs.own_server(config).llm_server
        for package in _packages_of(server.selected_options):
            option = f"launcher.server_args={launcher.server_args}"
            check_installed(package.module, package.requirement, option)


def _check_env(env: EnvConfig, section: str) -> None:
    """Check the packages that the environment's options ask for (api.fields.Package)."""
    for package in _packages_of(envs.options(env)):
        option = f"{env.type}.{package.option}" if package.option else f"type={env.type}"
        check_installed(package.module, package.requirement, f"{section}.{option}")


def _packages_of(options: Any) -> Iterable[Package]:
    """Return the optional packages that the options of a part ask for."""
    return options.packages() if hasattr(options, "packages") else ()
