"""The servers of `llm_server.addresses`: hooks `server_finder` and `server_registrar`."""

from collections.abc import Coroutine, Sequence
from typing import Any

from arealite.api.experiment_config import ExperimentConfig
from arealite.system.names.name_registry import Entry


def find(config: ExperimentConfig, model: dict[str, Any]) -> Sequence[Entry]:
    """Check every external server; return the names that they will have.

    Raises:
        UserError: See external_servers.examine.
    """
    if not config.llm_server.addresses:
        return []
    from arealite.ext.external import external_servers  # imports aiohttp

    return external_servers.examine(config, model)


def keep_registered(
    config: ExperimentConfig, *, updates: bool
) -> Coroutine[object, object, None] | None:
    """Return what keeps the names of the external servers up to date, or None without servers.

    Args:
        config: The experiment.
        updates: Whether the run publishes weights to the servers.
    """
    if not config.llm_server.addresses:
        return None
    from arealite.ext.external.external_servers import ExternalServers  # imports aiohttp

    return ExternalServers(config, updates=updates).run()
