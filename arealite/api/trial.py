"""The options that every process of a trial has: its names, its seed, and where it finds others."""

from __future__ import annotations

from dataclasses import dataclass

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where processes find each other and where a run keeps its files."""

    name_root: str = opt("~/.cache/arealite/names", "folder of the name registry; all hosts see it")
    run_root: str = opt("runs", "folder of all runs, seen by every host")
    user: str | None = opt(None, "whose names; null takes the login name")
    heartbeat_s: float = opt(1.0, "how often a role renews its name", above=0)
    ttl_s: float = opt(5.0, "a name not renewed for this long is dead", above=0)
    host: str = opt(
        "127.0.0.1", "address under which this host's roles are reached; auto: each host's own"
    )
    security: bool = opt(True, "ports ask for the trial's secret; off: anybody is let in")

    @property
    def bound(self) -> str:
        """The address that servers of a run bind: loopback, unless other hosts reach this one."""
        is_loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return "127.0.0.1" if is_loopback else "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """What all root configs have: those of an experiment, of a server and of an environment."""

    experiment_name: str = opt("arealite", "first part of the run's name; servers are found by it")
    trial_name: str = opt("trial", "second part")
    seed: int = opt(1, "of everything random", at_most=2**63 - 1)
    imports: list[str] = sub(
        list, "modules or .py files to import first: they register your own parts"
    )
    cluster: ClusterConfig = sub(ClusterConfig, "names and folders")
