"""Launchers bring up a run's processes, bring back those that die, and end them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arealite.api.fields import opt, sub
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.config import ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Parts of a Slurm job, each in sbatch's own words; one without words is on the head's nodes.

    What a node of a part has (CPUs, GPUs) is asked for per node.
    """

    every: list[str] = sub(list, "words for every part: [--account=a,--time=24:00:00]")
    head: list[str] = sub(lambda: ["--cpus-per-task=4"], "the supervisor's and the datapipe's")
    servers: list[str] = sub(list, "of launcher.llm_servers: [--nodes=4,--gres=gpu:8]")
    workers: list[str] = sub(list, "of launcher.rollout_workers: [--nodes=2,--partition=cpu]")
    trainers: list[str] = sub(list, "of launcher.trainer_ranks: [--nodes=4,--gres=gpu:8]")
    start_s: float = opt(300.0, "how long nodes may take to answer before they are named", above=0)


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """What each process takes of a Ray cluster; the datapipe stays with the supervisor."""

    address: str = opt("auto", "of the cluster; auto: RAY_ADDRESS, or the one of this machine")
    cpus: float = opt(1.0, "of each llm server and rollout worker", at_least=0)
    server_gpus: float = opt(0.0, "of each llm server: its tensor parallelism", at_least=0)
    trainer_cpus: float = opt(1.0, "of each trainer rank", at_least=0)
    trainer_gpus: float = opt(0.0, "of each trainer rank: 1 to train on GPUs", at_least=0)
    start_s: float = opt(300.0, "how long to wait for a place for all of them", above=0)


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """Which processes a run has, where they are started, and when they are started again."""

    type: str = opt("local", "name in the table of launchers")
    trainer_ranks: int = opt(1, "trainer processes", at_least=1)
    rollout_workers: int = opt(1, "rollout processes", at_least=1)
    max_workers: int = opt(
        0, "rollout processes at most, with collector.autoscale; 0: rollout_workers", at_least=0
    )
    llm_servers: int = opt(0, "servers started with the run; 0: by launch_llm_server", at_least=0)
    server_args: list[str] = sub(
        list, "overrides for those, as serve-llm takes them: [llm_server.type=sglang, …]"
    )
    trainer_threads: int = opt(1, "torch threads of a trainer rank on a CPU", at_least=1)
    drain_timeout_s: float = opt(
        60.0, "after the first Ctrl-C, for the step and a checkpoint", above=0
    )
    max_restarts: int = opt(5, "restarts of a role without a trained step in between", at_least=0)
    silent_s: float = opt(8.0, "a role without a sign of life for this long is restarted", above=0)
    blocked_s: float = opt(60.0, "a role whose loop is blocked for this long is restarted", above=0)
    slurm: SlurmConfig = sub(SlurmConfig, "for `arealite launch slurm`")
    ray: RayConfig = sub(RayConfig, "for `arealite launch ray`")


class Launcher(ABC):
    """Starts the datapipe, the rollout workers and the trainer ranks of one experiment."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config

    @abstractmethod
    def run(self) -> int:
        """Run the experiment to its end; return the exit code. No process it started survives
        it."""


launchers: Registry[Launcher] = Registry(
    "launcher",
    {
        "local": "arealite.impl.launcher.local:LocalLauncher",
        "slurm": "arealite.impl.launcher.slurm:SlurmLauncher",
        "ray": "arealite.impl.launcher.ray:RayLauncher",
    },
)
