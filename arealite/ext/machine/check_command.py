"""`arealite check CONFIG`: check a run without starting it, and estimate what it needs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, ServerConfig, run_paths
from arealite.api.offline import offline_run
from arealite.api.trial import ClusterConfig
from arealite.cli import configs
from arealite.cli.preflight import (
    check_model_folder,
    check_options,
    check_tensors,
    is_self_served,
    preflight,
    print_row,
)
from arealite.ext.machine import estimates
from arealite.ext.machine.task_lines import describe_tasks
from arealite.ext.models.adapter_options import lora_of
from arealite.ext.prompts.prompt_checks import longest_request
from arealite.system.names.name_registry import NameRegistry


def main(argv: Sequence[str]) -> int:
    """Check each stage and print a line for each part; the first error ends the command."""
    if "--machine" in argv:
        from arealite.ext.machine import command

        return command.main(argv)
    if "--served" in argv:
        from arealite.ext.served_policy import check_served

        return check_served.main(argv)
    if "--model" in argv:
        return _compare_model([word for word in argv if word != "--model"])
    stages = configs.parse_stages(
        argv,
        command="arealite check",
        description=(
            "Check a run without starting it: config, model, data, servers, memory, disk."
            "\nAlso: `arealite check --model --help`, `arealite check --machine --help`, "
            "`arealite check --served --help`."
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
                print_row(heading, line)
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
    request_tokens = None
    if config.trainer.is_offline:
        yield from offline_run(config.trainer.type).describe_rows(config)
    else:
        num_train = len(facts.train_tasks)
        num_eval = len(facts.eval_tasks)
        yield "data", f"{num_train} tasks to train, {num_eval} held out"
        yield from describe_tasks(config)
        yield "servers", ", ".join(facts.addresses) or _server_hint(config)
        yield "staleness", estimates.staleness(config)
        tasks = [*facts.train_tasks, *facts.eval_tasks]
        request_tokens = longest_request(config, tasks)
    if lora_of(config, facts.shapes).rank:
        yield "adapters", estimates.adapters(config, facts.shapes)
    yield from estimates.memory_lines(config, model, facts.shapes, request_tokens)
    yield "disk", estimates.disk(config, numel, facts.free_bytes)


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
