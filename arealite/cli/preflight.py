"""`arealite check CONFIG`, and the checks that `train` makes before it starts a process.

`preflight` runs all checks, cheap ones first. Each check raises UserError with one line that names
the fix. Rules between options are in the method `constraints` of the config class; rules about
files are beside the functions that read the files.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from arealite.api.agent import load_tokenizer
from arealite.api.env import Env, envs
from arealite.api.experiment_config import ExperimentConfig, ServerConfig, name_dir, run_paths
from arealite.api.llm_server import servers
from arealite.api.task import Task
from arealite.api.trial import ClusterConfig
from arealite.base import model_folder
from arealite.base.config import check_constraints
from arealite.base.errors import DeadlineError, UserError
from arealite.base.folder_checks import check_address, check_folder
from arealite.cli import configs
from arealite.cli.line_wrap import fold
from arealite.cli.packages import check_training_packages
from arealite.cli.resume import check_resume
from arealite.ext.curriculum.curriculum import Curriculum
from arealite.ext.hosting.client import make_env
from arealite.ext.machine import estimates
from arealite.ext.self_check import template
from arealite.impl.rollout.collector import check_seats
from arealite.system.data import prompts
from arealite.system.data.chats import check_examples
from arealite.system.data.dataset import identity
from arealite.system.data.tasks import (
    FIRST_ROWS,
    check_first_rows,
    describe,
    describe_rows,
    load_split,
    shares,
)
from arealite.system.names.name_registry import Entry, NameRegistry

MIN_FREE_BYTES = 64 << 20


class Facts(NamedTuple):
    """The data that the checks have read."""

    model: dict[str, Any]
    """config.json of the model."""
    shapes: model_folder.Shapes
    """The shape of each tensor of the model, by name."""
    free_bytes: int
    """Free space of the run folder's disk."""
    num_train_tasks: int = 0
    """Number of training tasks; 0 for offline trainers."""
    num_eval_tasks: int = 0
    """Number of held-out tasks; 0 for offline trainers."""
    longest_request: int | None = None
    """See prompts.longest_request."""
    addresses: Sequence[str] = ()
    """Addresses of the servers that were started before the run."""


def main(argv: Sequence[str]) -> int:
    """Check each stage and print a line for each part; the first error ends the command."""
    if "--machine" in argv:
        from arealite.ext.machine import command

        return command.main(argv)
    if "--model" in argv:
        return _compare_model([word for word in argv if word != "--model"])
    stages = configs.parse_stages(
        argv,
        command="arealite check",
        description=(
            "Check a run without starting it: config, model, data, servers, memory, disk."
            "\nAlso: `arealite check --model --help`, `arealite check --machine --help`."
        ),
    )
    for config in stages:
        check_options(config)
    exports = set[str]()
    for number, config in enumerate(stages, start=1):
        if len(stages) > 1:
            print(f"stage {number} of {len(stages)}")
        path = config.model.path
        if path in exports and not Path(path).exists():
            print(f"{'model':<10} of an earlier stage; check again after that stage")
        else:
            for heading, line in report(config):
                _print_row(heading, line)
        exports.add(str(run_paths(config).export))
    print("ok: all checks passed")
    return 0


def _compare_model(argv: Sequence[str]) -> int:
    """Compare the trainer's model with a server and with transformers; return the exit code."""

    def parse(*overrides: str) -> ExperimentConfig:
        return configs.parse(
            ExperimentConfig,
            [*argv, *overrides],
            command="arealite check",
            description="Compare the trainer with an embedded server and with plain transformers.",
        )

    check_model_folder(parse())
    from arealite.ext.machine import check_model  # imports torch

    # The comparison has one rank.
    config = parse(
        "trainer.ppo.engine.fsdp.context_parallel=1",
        "trainer.offline.engine.fsdp.context_parallel=1",
    )
    return check_model.main(config)


def _print_row(heading: str, line: str) -> None:
    """Print a line of the report, with its heading in the first column."""
    print(fold(f"{heading:<10} {line}"), flush=True)


def report(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Check one run; yield (heading, line) for each part.

    Raises:
        UserError: See preflight.
    """
    is_served = bool(config.llm_server.addresses or NameRegistry.of(config).list("llm_server"))
    facts = preflight(config, has_servers=is_served)
    check_tensors(config)
    model = facts.model
    numel = estimates.count(facts.shapes)
    kind = model.get("model_type", "?")
    context = model.get("max_position_embeddings", "?")
    yield "model", f"{kind}, {numel / 1e6:,.2f} M parameters, context {context}"
    if config.trainer.is_offline:
        yield from describe_rows(config)
    else:
        yield "data", f"{facts.num_train_tasks} tasks to train, {facts.num_eval_tasks} held out"
        yield from describe(config)
        yield "servers", ", ".join(facts.addresses) or _server_hint(config)
        yield "staleness", estimates.staleness(config)
    if estimates.lora_of(config, facts.shapes).rank:
        yield "adapters", estimates.adapters(config, facts.shapes)
    yield from estimates.memory_lines(config, model, facts.shapes, facts.longest_request)
    yield "disk", estimates.disk(config, numel, facts.free_bytes)


def preflight(config: ExperimentConfig, *, has_servers: bool = True) -> Facts:
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
    facts = Facts(model=model, shapes=shapes, free_bytes=free_bytes)
    if config.trainer.is_offline:
        _check_offline_data(config, model)
        return facts
    return _check_tasks_and_servers(config, facts, has_servers=has_servers)


def _check_offline_data(config: ExperimentConfig, model: dict[str, Any]) -> None:
    """Check the rows and the folder of an offline trainer's run; print warnings."""
    reference = config.trainer.dpo.reference
    model_folder.check_vocabulary(reference, model, key="trainer.dpo.reference")
    checked = check_examples(config, model)
    if checked.untrained:
        num_skipped = len(checked.untrained)
        print(
            fold(
                f"{num_skipped} rows have no tokens to train and are skipped; "
                f"the first: {checked.untrained[0]}"
            )
        )
    if checked.unread:
        _print_row("data", f"not read, and without effect: {checked.unread}")
    check_resume(config, checked.identity)
    print_warm_ups(config, int(checked.identity["dataset_rows"]))


def _check_tasks_and_servers(config: ExperimentConfig, facts: Facts, *, has_servers: bool) -> Facts:
    """Check the tasks, folder, servers and prompts of a PPO run; return all facts."""
    ppo = config.trainer.ppo
    model = facts.model
    check_sources(config)
    check_first_rows(config)
    train_tasks = load_split(config, "train")
    eval_tasks = load_split(config, "eval")
    all_tasks = [*train_tasks, *eval_tasks]
    _check_batch_size(config, len(train_tasks))
    Curriculum(
        config.datapipe.curriculum,
        train_tasks,
        seed=config.seed,
        shuffle=config.dataset.shuffle,
    )
    model_folder.check_vocabulary(ppo.kl.reference, model, key="trainer.ppo.kl.reference")
    model_folder.check_vocabulary(ppo.critic.path, model, key="trainer.ppo.critic.path")
    check_resume(config, identity(config, train_tasks))
    servers_now = list[Entry]()
    if has_servers and not is_self_served(config):
        servers_now = find_servers(config, model)
    prompts.check_prompts(config, all_tasks, contexts(config, model, servers_now))
    longest_request = prompts.longest_request(config, all_tasks)
    line = prompts.template_line(config, all_tasks)
    if line:
        _print_row("prompts", line)
    print_warm_ups(config)
    for warning in check_templates(config, train_tasks, eval_tasks):
        _print_row("template", f"warning: {warning}")
    return facts._replace(
        num_train_tasks=len(train_tasks),
        num_eval_tasks=len(eval_tasks),
        longest_request=longest_request,
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


def check_templates(config: ExperimentConfig, *splits: Sequence[Task]) -> list[str]:
    """Check the chat template, and the first prompts of each split that go through it.

    Returns:
        Warnings about the template.

    Raises:
        UserError: See prompts.check_rendering and template.check_template.
    """
    if not prompts.uses_template(config, list(chain.from_iterable(splits))):
        return []
    tokenizer: Any = load_tokenizer(config.model.path)
    template_warnings = template.check_template(config, tokenizer)
    first_tasks = [task for split in splits for task in split[:FIRST_ROWS]]
    rendering_warnings = prompts.check_rendering(config, first_tasks, tokenizer)
    return [*rendering_warnings, *template_warnings]


def print_warm_ups(config: ExperimentConfig, num_rows: int = 0) -> None:
    """Print a line for each optimizer whose warm-up is longer than the run."""
    for warning in estimates.short_warm_ups(config, num_rows):
        _print_row("warm-up", f"warning: {warning}")


def check_model_folder(config: ExperimentConfig) -> tuple[dict[str, Any], model_folder.Shapes]:
    """Check the model's files, and the options that depend on them; see read_model."""
    path = config.model.path
    trainer = config.trainer
    model, shapes = model_folder.read_model(required(path, "model.path"))
    model_folder.check_context_parallel(
        model,
        size=trainer.own.engine.fsdp.context_parallel,
        ranks=config.launcher.trainer_ranks,
    )
    estimates.lora_of(config, shapes)
    if trainer.type != "reward":
        model_folder.check_layers(model, path)
    return model, shapes


def check_tensors(config: ExperimentConfig) -> None:
    """Compare the folder's tensors and the adapters with the model of its config.json.

    It imports torch, which takes seconds, so a run leaves it to the trainer.

    Raises:
        UserError: transformers cannot build the model, or a tensor or a target has no counterpart.
    """
    from arealite.ext.models import lora
    from arealite.impl.engine import loading
    from arealite.impl.weights.tensor_names import TensorNames

    head = "value" if config.trainer.type == "reward" else "lm"
    folder = Path(config.model.path).expanduser()
    model = loading.empty_model(folder, head)
    TensorNames(model, folder)
    adapter = config.model.adapter
    adapter_folder = Path(adapter).expanduser() if adapter else None
    lora_options = estimates.lora_of(config, {})
    if lora_options.rank:
        lora.inject(model, lora_options, head, adapter_folder)
    if adapter_folder:
        lora.load_adapter(model, adapter_folder)


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
        check_constraints(config.trainer.sft, "trainer.sft.")
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
        elif part.env.type == "harness":
            env = make_env(config, part.env)  # checks its program or function
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
    if publisher.type == "distributed":
        check_address(
            config.cluster.host,
            publisher.distributed.port,
            at="trainer.ppo.publisher.distributed",
        )
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
    """Return whether the run starts its servers or needs none (publisher shared)."""
    return config.trainer.ppo.publisher.type == "shared" or config.launcher.llm_servers > 0


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
    if config.llm_server.addresses:
        from arealite.ext.external import external_servers  # imports aiohttp

        return [*external_servers.examine(config, model), *registered]
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


def _server_hint(config: ExperimentConfig) -> str:
    """Return the servers that the run will use, or the command that starts one."""
    if config.launcher.llm_servers:
        return "started with the run"
    if is_self_served(config):
        return "the trainer itself"
    words = [
        f"experiment_name={config.experiment_name}",
        f"trial_name={config.trial_name}",
    ]
    default_options = asdict(ClusterConfig())
    for key, option in asdict(config.cluster).items():
        if option != default_options[key]:  # the server must use the same
            words.append(f"cluster.{key}={option}")
    if config.cluster.bound != ServerConfig().llm_server.host:
        words.append(f"llm_server.host={config.cluster.bound}")
    words.append(f"model.path={config.model.path}")
    return f"none yet; start one: arealite serve-llm {' '.join(words)}"
