"""`arealite check CONFIG`, and the checks that `train` makes before it starts a process.

`preflight` runs all checks, cheap ones first. Each check raises UserError with one line that names
the fix. Rules between options are in the method `constraints` of the config class; rules about
files are beside the functions that read the files.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from arealite.api.agent import load_tokenizer
from arealite.api.config import ExperimentConfig, ServerConfig, name_dir, run_paths
from arealite.api.env import Env, envs
from arealite.api.llm_server import servers
from arealite.api.task import Task
from arealite.api.trial import ClusterConfig
from arealite.base import model_folder
from arealite.base.config import check_constraints
from arealite.base.errors import DeadlineError, UserError
from arealite.base.places import check_address, check_folder
from arealite.cli import configs, estimates
from arealite.cli.fold import fold
from arealite.cli.packages import check_training_packages
from arealite.cli.resume import check_resume
from arealite.impl.env_client import make_env
from arealite.impl.rollout.collector import check_seats
from arealite.impl.self_check import template
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
from arealite.system.datapipe.curriculum import Curriculum
from arealite.system.names.registry import Entry, NameRegistry

MIN_FREE_BYTES = 64 << 20


class Facts(NamedTuple):
    """The data that the checks have read."""

    model: dict[str, Any]
    """config.json of the model."""
    shapes: model_folder.Shapes
    """The shape of each tensor of the model, by name."""
    free_bytes: int
    """Free space of the run folder's disk."""
    tasks: tuple[int, int] = (0, 0)
    """Number of training and held-out tasks; (0, 0) for offline trainers."""
    longest: int | None = None
    """See prompts.longest_request."""
    addresses: Sequence[str] = ()
    """Addresses of the servers that were started before the run."""


def main(argv: Sequence[str]) -> int:
    """Check each stage and print a line for each part; the first error ends the command."""
    if "--machine" in argv:
        from arealite.cli.machine import command

        return command.main(argv)
    description = "Check a run without starting it: config, model, data, servers, memory, disk."
    if "--model" in argv:
        words = [word for word in argv if word != "--model"]
        text = "Compare the trainer with an embedded server and with plain transformers."
        parse = partial(configs.parse, ExperimentConfig, command="arealite check", description=text)
        check_model_folder(parse(words))
        from arealite.cli import check_model  # imports torch

        one = [f"trainer.{own}.engine.fsdp.context_parallel=1" for own in ("ppo", "offline")]
        return check_model.main(parse([*words, *one]))  # there is one rank
    description += "\nAlso: `arealite check --model --help`, `arealite check --machine --help`."
    stages = configs.parse_stages(argv, command="arealite check", description=description)
    for config in stages:
        check_options(config)
    for number, config in enumerate(stages, start=1):
        if len(stages) > 1:
            print(f"stage {number} of {len(stages)}")
        made = [str(run_paths(earlier).export) for earlier in stages[: number - 1]]
        if config.model.path in made and not Path(config.model.path).exists():
            print(f"{'model':<10} of an earlier stage; check again after that stage")
            continue
        for what, text in report(config):
            print(fold(f"{what:<10} {text}"), flush=True)
    print("ok: all checks passed")
    return 0


def report(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Check one run; yield (heading, text) for each part.

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
        yield "data", f"{facts.tasks[0]} tasks to train, {facts.tasks[1]} held out"
        yield from describe(config)
        yield "servers", ", ".join(facts.addresses) or _server_hint(config)
        yield "staleness", estimates.staleness(config)
    if estimates.lora_of(config, facts.shapes).rank:
        yield "adapters", estimates.adapters(config, facts.shapes)
    yield from estimates.memory_lines(config, model, facts.shapes, facts.longest)
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
    trainer = config.trainer
    ppo = config.trainer.ppo
    free = check_run_folder(config)
    check_addresses(config)
    if config.view.web:
        check_address("127.0.0.1", config.view.port, at="view")
    if trainer.is_offline:
        model_folder.check_vocabulary(trainer.dpo.reference, model, key="trainer.dpo.reference")
        checked = check_examples(config, model)
        if checked.untrained:
            what = f"{len(checked.untrained)} rows have no tokens to train and are skipped"
            print(fold(f"{what}; the first: {checked.untrained[0]}"))
        if checked.unread:
            print(fold(f"{'data':<10} not read, and without effect: {checked.unread}"), flush=True)
        check_resume(config, checked.identity)
        print_warm_ups(config, int(checked.identity["dataset_rows"]))
        return Facts(model, shapes, free)
    check_sources(config)
    check_first_rows(config)
    tasks = load_split(config, "train")
    held_out = load_split(config, "eval")
    if len(tasks) < ppo.num_groups:
        size = f"batch_size {ppo.batch_size} / group_size {ppo.collector.group_size}"
        what = f"{len(tasks)} rows, a batch needs {ppo.num_groups} ({size})"
        where = config.dataset.train or "dataset.rows"
        raise UserError(f"{where} has {what}. Use a smaller batch_size or more rows.")
    Curriculum(config.datapipe.curriculum, tasks, seed=config.seed, shuffle=config.dataset.shuffle)
    model_folder.check_vocabulary(ppo.kl.reference, model, key="trainer.ppo.kl.reference")
    model_folder.check_vocabulary(ppo.critic.path, model, key="trainer.ppo.critic.path")
    check_resume(config, identity(config, tasks))
    found = find_servers(config, model) if has_servers and not is_self_served(config) else []
    prompts.check_prompts(config, [*tasks, *held_out], contexts(config, model, found))
    longest = prompts.longest_request(config, [*tasks, *held_out])
    if line := prompts.template_line(config, [*tasks, *held_out]):
        print(fold(f"{'prompts':<10} {line}"), flush=True)
    print_warm_ups(config)
    for fault in check_templates(config, tasks, held_out):
        print(fold(f"{'template':<10} warning: {fault}"), flush=True)
    addresses = [str(server.value["address"]) for server in found]
    return Facts(model, shapes, free, (len(tasks), len(held_out)), longest, addresses)


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
    faults = template.check_template(config, tokenizer)
    first_tasks = [task for split in splits for task in split[:FIRST_ROWS]]
    return [*prompts.check_rendering(config, first_tasks, tokenizer), *faults]


def print_warm_ups(config: ExperimentConfig, num_rows: int = 0) -> None:
    """Print a line for each optimizer whose warm-up is longer than the run."""
    for text in estimates.short_warm_ups(config, num_rows):
        print(fold(f"{'warm-up':<10} warning: {text}"), flush=True)


def check_model_folder(config: ExperimentConfig) -> tuple[dict[str, Any], model_folder.Shapes]:
    """Check the model's files, and the options that depend on them; see read_model."""
    path = config.model.path
    trainer = config.trainer
    model, shapes = model_folder.read_model(required(path, "model.path"))
    ranks = config.launcher.trainer_ranks
    size = trainer.own.engine.fsdp.context_parallel
    model_folder.check_context_parallel(model, size=size, ranks=ranks)
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
    from arealite.impl.engine import loading, lora
    from arealite.impl.weights.names import TensorNames

    head = "value" if config.trainer.type == "reward" else "lm"
    path = config.model.path
    model = loading.empty_model(Path(path).expanduser(), head)
    TensorNames(model, Path(path).expanduser())
    folder = Path(config.model.adapter).expanduser() if config.model.adapter else None
    if (own := estimates.lora_of(config, {})).rank:
        lora.inject(model, own, head, folder)
    if folder:
        lora.load_adapter(model, folder)


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
    collector = config.trainer.ppo.collector
    rows = config.dataset.rows
    counts = shares({name: part.weight for name, part in collector.envs.items()}, rows)
    if none := [name for name, count in counts.items() if not count]:
        where = f"collector.envs.{none[0]}.weight={collector.envs[none[0]].weight:g}"
        raise UserError(f"{where} is less than one row of dataset.rows={rows}. Raise one of them.")
    for part in collector.parts.values():
        made: object = envs.get(part.env.type)
        if part.env.runtime.type != "in_process":
            make_env(config, part.env)  # checks `runtime.addresses` and `runtime.token_env`
        elif part.env.type == "harness":
            made = make_env(config, part.env)  # checks its program or function
        seats = getattr(made, "seats", None)
        if seats and isinstance(seats, tuple) and seats is not Env.seats:
            check_seats(part, cast(tuple[str, ...], seats))


def check_sources(config: ExperimentConfig) -> None:
    """Check that the tasks have exactly one source: dataset or collector.envs."""
    if not config.trainer.ppo.collector.envs:
        required(config.dataset.train, "dataset.train")
    elif config.dataset.train or config.dataset.eval or config.trainer.ppo.collector.seats:
        what = "collector.envs has several environments: set train, eval and seats of each of them"
        fix = "not dataset.train, dataset.eval and collector.seats."
        raise UserError(f"{what} (trainer.ppo.collector.envs.NAME.train=…), {fix}")


# ------------------------------------------------------------ this host


def check_run_folder(config: ExperimentConfig) -> int:
    """Check that the trial's folder can be created and written; return the free bytes."""
    root = run_paths(config).root
    free = check_folder(root, "run folder", "cluster.run_root")
    if free < MIN_FREE_BYTES:
        what = f"the disk of run folder {root} has {free >> 20} MiB free, a run needs at least"
        fix = "Free some, or set cluster.run_root to another disk."
        raise UserError(f"{what} {MIN_FREE_BYTES >> 20} MiB. {fix}")
    return free


def check_addresses(config: ExperimentConfig) -> None:
    """Check that the roles of this host can listen at their addresses."""
    where = config.launcher.type
    publisher = config.trainer.ppo.publisher
    if config.trainer.is_offline or where == "slurm":
        return
    if config.cluster.host != "auto":
        check_address(config.cluster.host, at="cluster")
    if where == "local" and publisher.type == "distributed":
        at = "trainer.ppo.publisher.distributed"
        port = publisher.distributed.port
        check_address(config.cluster.host, port, at=at)
    if where == "local" and config.launcher.llm_servers:
        server = configs.own_server(config).llm_server
        servers.check(server.type)
        if server.port and config.launcher.llm_servers > 1:
            what = f"is one port for {config.launcher.llm_servers} servers"
            raise UserError(f"llm_server.port={server.port} {what}. Remove it from server_args.")
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
    names = NameRegistry.of(config)
    known = names.list("llm_server")
    wait_s = config.server_wait_s
    try:
        if config.llm_server.addresses:
            from arealite.impl.server import external  # imports aiohttp

            found = [*external.examine(config, model), *known]
        else:
            if not known:
                print(f"waiting up to {wait_s:g} s for a language-model server", flush=True)
            found = asyncio.run(names.wait("llm_server", seconds=wait_s, owner="train.py"))
    except DeadlineError as error:
        experiment = config.experiment_name
        trial = config.trial_name
        what = f"no language-model server for {experiment}/{trial} within {wait_s:g} s"
        words = f"experiment_name={experiment} trial_name={trial} model.path={config.model.path}"
        fix = f"Start one: python3 arealite/launch_llm_server.py {words}, or let the run start one"
        where = f"looked in {name_dir(config)}"
        raise UserError(f"{what} ({where}). {fix}: launcher.llm_servers=1") from error
    for server in found:
        if difference := model_folder.model_difference(server.value, model):
            fix = f"Start it with model.path={config.model.path}, or use another trial_name."
            raise UserError(f"the server at {server.value['address']}: {difference} {fix}")
    return found


def contexts(config: ExperimentConfig, model: dict[str, Any], found: Sequence[Entry]) -> list[int]:
    """Return the known context lengths of the servers `found` or of the run's own servers."""
    if found:
        lengths = [server.value.get("context_length") for server in found]
    else:
        own = config.launcher.llm_servers and configs.own_server(config).llm_server.context_length
        lengths = [own or model_folder.exact_length(model) or model.get("max_position_embeddings")]
    return [length for length in lengths if length]


def _server_hint(config: ExperimentConfig) -> str:
    """Return the servers that the run will use, or the command that starts one."""
    if is_self_served(config):
        return "started with the run" if config.launcher.llm_servers else "the trainer itself"
    words = [f"{key}={getattr(config, key)}" for key in ("experiment_name", "trial_name")]
    own = asdict(config.cluster)
    default = asdict(ClusterConfig())  # the server must use the same
    words += [f"cluster.{key}={own[key]}" for key in own if own[key] != default[key]]
    if config.cluster.bound != ServerConfig().llm_server.host:
        words.append(f"llm_server.host={config.cluster.bound}")
    words.append(f"model.path={config.model.path}")
    return f"none yet; start one: arealite serve-llm {' '.join(words)}"
