"""Stages of `train`: several runs of one command, one after the other."""

from collections.abc import Sequence
from dataclasses import replace

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base.config import Layer, read_layers
from arealite.base.errors import UserError
from arealite.cli import configs, options

THEN = """\
stages: --config sft model.path=M dataset.train=chats.jsonl \\
            --then async_ppo dataset.train=tasks.jsonl
  Each --then begins a stage. A stage runs after the stage before has succeeded,
  and starts from the newest exported policy unless it sets model.path.
  Overrides before the first --then apply to every stage, except model.path;
  others apply to their own.
  The last stage has the trial's name; earlier ones add -stage1, -stage2, …
  After a stop, the same command resumes.
"""
"""The rules of stages, for `--help`."""


def parse(
    line: options.CommandLine,
    argv: Sequence[str],
) -> list[ExperimentConfig] | None:
    """Return the config of each stage; None for a command line without `--then` (hook `stages`).

    Raises:
        UserError: See load_stages.
    """
    is_help = not {"-h", "--help"}.isdisjoint(argv)
    has_stages = any(word.startswith("--then") for word in argv)
    return load_stages(split(line, argv)) if is_help or has_stages else None


def split(
    line: options.CommandLine,
    argv: Sequence[str],
) -> list[options.Layers]:
    """Parse arguments with `--then FILE`; return the Layers of each stage."""
    line = replace(line, more=f"{THEN}\n")
    stages = [list[str]()]
    for word in argv:
        if word == "--then" or word.startswith("--then="):
            stages.append(["--config", *word.split("=", 1)[1:]])
        else:
            stages[-1].append(word)
    return [line.parse(stage) for stage in stages]


def load_stages(stages: Sequence[options.Layers]) -> list[ExperimentConfig]:
    """Load the config of each stage. THEN describes the rules.

    Raises:
        UserError: See load; or a stage exports no model and the next stage has no model.path.
    """
    stage_configs = list[ExperimentConfig]()
    shared_overrides = list[Layer]()
    for number, stage in enumerate(stages, start=1):
        *files, overrides = read_layers(stage.files, stage.overrides)
        config = configs.merge(ExperimentConfig, [*files, *shared_overrides, overrides])
        if not shared_overrides:
            shared_overrides = [overrides]
        path = _stage_model([*files, overrides], stage_configs, default=config.model.path)
        config = replace(config, model=replace(config.model, path=path))
        if number < len(stages):
            config = replace(config, trial_name=f"{config.trial_name}-stage{number}")
        stage_configs.append(config)
    return stage_configs


def _stage_model(
    layers: Sequence[Layer], earlier: Sequence[ExperimentConfig], *, default: str
) -> str:
    """Return the `model.path` that a stage sets itself, else the export of the newest policy.

    Args:
        layers: The options of the stage.
        earlier: The configs of all earlier stages.
        default: The path if the stage sets none and no earlier stage trains a policy.

    Raises:
        UserError: The newest policy is not exported.
    """
    for layer in reversed(layers):
        if "path" in layer.options.get("model", {}):
            return str(layer.options.model.path)
    policies = [config for config in earlier if config.trainer.type != "reward"]
    if not policies:
        return default
    trainer = policies[-1].trainer
    if not trainer.is_offline and not trainer.ppo.checkpoint.export:
        raise UserError(
            f"stage {len(earlier) + 1} has no model: "
            "the stage before has trainer.ppo.checkpoint.export=false. "
            "Set it to true there, or set model.path after --then."
        )
    return str(run_paths(policies[-1]).export)
