"""The adapter that a run sends alone to the servers that it starts."""

from collections.abc import Iterable

from arealite.api.engine_config import LoRAConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.base.model_folder import experts_of, read_json
from arealite.cli import configs
from arealite.ext.models.adapter_options import lora_of
from arealite.ext.server_processes.config import ServerProcessOptions


def sent_adapter(config: ExperimentConfig) -> LoRAConfig | None:
    """Return the options of the adapter; None if the run sends whole weights or starts no server.

    SGLang and vLLM would need other kernels for a mixture of experts.
    """
    sends_folders = config.trainer.ppo.publisher.type == "disk"
    if config.trainer.is_offline or not (sends_folders and config.launcher.llm_servers):
        return None
    lora = lora_of(config, {})
    if not lora.rank or experts_of(read_json(config.model.path)) is not None:
        return None
    return lora


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
