"""Refuses a quantised server in a run that compares its log-probabilities with the trainer's."""

from collections.abc import Iterable

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.base.errors import UserError
from arealite.cli import configs


def check_run(config: ExperimentConfig, _: RunFacts) -> Iterable[tuple[str, str]]:
    """Refuse checks that a quantised server of the run cannot pass. Hook `check`.

    Raises:
        UserError: The self-check or the canary is on.
    """
    publisher = config.trainer.ppo.publisher
    is_compared = publisher.self_check or publisher.canary
    if not (config.launcher.llm_servers and is_compared):
        return []
    server = configs.own_server(config).llm_server
    if server.type == "embedded" and server.embedded.quantization != "none":
        raise UserError(
            f"llm_server.embedded.quantization={server.embedded.quantization} rounds the served "
            "weights, so they never give the trainer's log-probabilities, and neither self-check "
            "nor canary can tell rounding from wrong weights. "
            "Use trainer.ppo.publisher.self_check=false trainer.ppo.publisher.canary=false."
        )
    return []
