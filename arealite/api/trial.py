"""Options of every process of a trial: names, seed, cluster."""

from dataclasses import dataclass

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Folders, names and addresses that the processes of a run share."""

    name_root: str = opt("~/.cache/arealite/names", "folder of the name registry, on all hosts")
    run_root: str = opt("runs", "folder of all runs, on all hosts")
    user: str | None = opt(None, "user name in the name registry; null: the login name")
    heartbeat_s: float = opt(1.0, "time between heartbeats of a name", above=0)
    ttl_s: float = opt(5.0, "time without a heartbeat after which a name expires", above=0)
    host: str = opt("127.0.0.1", "address of this host for other roles; auto: each host's own")
    security: bool = opt(True, "require the trial's secret on all ports; false: open ports")

    @property
    def bound(self) -> str:
        """The address that servers bind: loopback if `host` is loopback, else all interfaces."""
        is_loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return "127.0.0.1" if is_loopback else "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Base of all root configs: of an experiment, of a server, of an environment server."""

    experiment_name: str = opt("arealite", "first part of the run's name")
    trial_name: str = opt("trial", "second part of the run's name")
    seed: int = opt(1, "seed of all random numbers", at_most=2**63 - 1)
    imports: list[str] = sub(list, "modules or .py files to import first, like your own agents")
    cluster: ClusterConfig = sub(ClusterConfig, "folders, names and addresses")
