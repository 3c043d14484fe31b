"""Options of `arealite serve-tinker`."""

from dataclasses import dataclass

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.fields import opt, part


@dataclass(frozen=True, kw_only=True)
class TinkerConfig:
    """The HTTP service for clients of the `tinker` SDK."""

    host: str = opt("127.0.0.1", "address to bind; other than loopback: open to the network")
    port: int = opt(8765, "port; 0: a free port", at_least=0, at_most=65535)
    base_model: str = opt("", 'name of the model for clients, as in "org/model"; "": model.path')
    keys_file: str | None = opt(
        None, "file with a line `TENANT KEY` for each tenant; null: one tenant with the trial's key"
    )
    max_models: int = opt(8, "models that a tenant may train at a time", at_least=1)
    max_rank: int = opt(128, "largest LoRA rank", at_least=1)
    max_pending: int = opt(4096, "unfinished requests of a tenant; further ones wait", at_least=1)
    max_body_mb: int = opt(64, "largest body of a request", at_least=1)
    max_samplers: int = opt(16, "adapters that the servers keep loaded", at_least=1)
    idle_s: float = opt(
        900.0,
        "end a client's session after this long without a heartbeat; saves its models",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class TinkerServerConfig(ExperimentConfig):
    """Root of `arealite serve-tinker`: a session's options, and those of the service."""

    tinker: TinkerConfig = part(TinkerConfig)
