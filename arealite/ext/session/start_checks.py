"""The options of a session, checked before a process starts."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import structlog

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.api.llm import SamplingConfig
from arealite.base import log
from arealite.base.errors import UserError
from arealite.base.files import lock_file
from arealite.cli import configs, preflight, resolved
from arealite.ext.notebook.command_line import resolve
from arealite.ext.session.added_adapter import new_adapter
from arealite.system.names.name_registry import NameRegistry

IN_USE = "Close the other session, or pass another trial."


def prepared(
    model: str | Path,
    words: Sequence[str],
    resources: ExitStack,
    *,
    has_ledger: bool,
) -> tuple[ExperimentConfig, dict[str, Any]]:
    """Check the options of a session, and lock its trial's folders.

    Args:
        model: The model's folder or id.
        words: The options.
        resources: Gets the locks.
        has_ledger: Whether the session keeps a ledger.

    Returns:
        The options, and config.json of the model.

    Raises:
        UserError: A check failed.
    """
    config = resolve(ExperimentConfig, "async_ppo", words, data={}, parts={"model": model})
    config = resolved.resolve_host(configs.with_model(config))
    model_config = check_input(config)
    paths = run_paths(config)
    if paths.ledger.exists() and not has_ledger:
        raise UserError(
            f"trial {config.trial_name!r} has a ledger, {paths.ledger}, in which the samples of "
            "this session would be missing. Pass ledger=True, or another trial."
        )
    for folder in (name_dir(config), paths.root):
        folder.mkdir(parents=True, exist_ok=True)
        resources.enter_context(lock_file(folder / ".lock", fix=IN_USE))
    paths.logs.mkdir(exist_ok=True)
    if not structlog.is_configured():
        log.setup("session", "error")
    return config, model_config


def check_adapters(config: ExperimentConfig, names: Sequence[str]) -> None:
    """Raise UserError if two adapters have one name, or a name is wrong."""
    for name in names:
        new_adapter(config, name)
        if names.count(name) > 1:
            raise UserError(f"adapters: '{name}' is in the list twice. Use other names.")


def check_served(name: str, folder: Path) -> None:
    """Raise UserError if a name cannot be served, or a folder has no adapter that peft wrote."""
    if not re.fullmatch(r"[\w.-]{1,200}", name, re.ASCII):
        raise UserError(
            f"serve: {name!r}: use letters, digits, '.', '_' and '-' for the name, up to 200."
        )
    if not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"serve: {folder} has no adapter_config.json. Pass the folder of an adapter."
        )


def check_no_ledger(call: str, *, has_ledger: bool) -> None:
    """Raise UserError if a session with a ledger would get adapters by name."""
    if has_ledger:
        raise UserError(
            f"{call}: a ledger has the steps of one set of weights, so a session with ledger=True "
            "has no adapters by name. Use lora=32 in place of adapters, or leave out ledger."
        )


def check_sampling(sampling: SamplingConfig) -> None:
    """Refuse options with which some tokens cannot be sampled.

    Raises:
        UserError: One is set.
    """
    if sampling.num_truncated > 0:
        raise UserError(
            "sample: with top_p, top_k, min_p or min_new_tokens, training would be off-policy, "
            "because samples do not record which tokens could be sampled. Leave these options out."
        )


def check_input(config: ExperimentConfig) -> dict[str, Any]:
    """Check the options, the model, the folders and the servers, in the order of their cost.

    Returns:
        config.json of the model.

    Raises:
        UserError: A check failed.
    """
    import torch
    import torch.distributed as dist

    ppo = config.trainer.ppo
    num_gpus = torch.cuda.device_count()
    if num_gpus and config.launcher.trainer_ranks > num_gpus:
        raise UserError(
            f"ranks={config.launcher.trainer_ranks}: each rank has a GPU of its own, and there are "
            f"{num_gpus}. Use at most ranks={num_gpus}."
        )
    if ppo.publisher.type != "disk":
        raise UserError(
            f"trainer.ppo.publisher.type={ppo.publisher.type}: a session publishes through files. "
            "Use disk."
        )
    check_sampling(ppo.collector.sampling)
    if dist.is_initialized():
        raise UserError(
            "this process has a process group of torch.distributed, or another session. Close it."
        )
    NameRegistry.of(config).check()
    preflight.check_options(config)
    model, _ = preflight.check_model_folder(config)
    preflight.check_tensors(config)
    preflight.check_run_folder(config)
    preflight.check_addresses(config)
    if not config.launcher.llm_servers:
        preflight.find_servers(config, model)
    return model
