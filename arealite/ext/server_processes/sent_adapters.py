"""The adapters that a run or a session sends alone to the servers that it starts."""

from collections.abc import Iterable
from dataclasses import replace

from arealite.api.engine_config import NAMED_RANK, LoRAConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.base.model_folder import experts_of, read_json
from arealite.cli import configs
from arealite.ext.models.adapter_options import lora_of
from arealite.ext.server_processes.config import ServerProcessOptions

NAMED_ADAPTERS = 8
"""Adapters that requests in one batch may name, if a session has adapters by name."""


def sent_adapter(config: ExperimentConfig) -> LoRAConfig | None:
    """Return the options of the adapter; None if the run sends whole weights or starts no server.

    For adapters by name, the rank is the one that they have by default. SGLang and vLLM would need
    other kernels for a mixture of experts.
    """
    sends_folders = config.trainer.ppo.publisher.type == "disk"
    if config.trainer.is_offline or not (sends_folders and config.launcher.llm_servers):
        return None
    lora = lora_of(config, {})
    if lora.only_named:
        lora = replace(lora, rank=lora.rank or NAMED_RANK)
    if not lora.rank or experts_of(read_json(config.model.path)) is not None:
        return None
    return lora


def options_of(kind: str, lora: LoRAConfig) -> dict[str, object]:
    """Return the options of the servers of a kind that load adapters."""
    options: dict[str, object] = {f"llm_server.{kind}.adapter_rank": lora.rank}
    if lora.only_named:
        options[f"llm_server.{kind}.adapters_per_batch"] = NAMED_ADAPTERS
    return options


def check_run(config: ExperimentConfig, _: RunFacts) -> Iterable[tuple[str, str]]:
    """Warn if the servers of a run cannot take its adapter alone. Hook `check`."""
    lora = sent_adapter(config)
    if lora is None:
        return
    server = configs.own_server(config).llm_server
    options = server.selected_options
    if isinstance(options, ServerProcessOptions) and not options.adapter_rank:
        yield (
            "adapters",
            f"{server.type} servers cannot load adapters of rank {lora.rank} on "
            f"{', '.join(lora.targets)}: they get merged weights",
        )
