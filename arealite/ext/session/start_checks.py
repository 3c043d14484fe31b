"""Checks of a session's options, before a process starts."""

from typing import Any

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import SamplingConfig
from arealite.base.errors import UserError
from arealite.cli import preflight
from arealite.system.names.name_registry import NameRegistry


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
    import torch.distributed as dist

    ppo = config.trainer.ppo
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
