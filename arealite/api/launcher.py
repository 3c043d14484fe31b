"""The launcher interface: start the processes of a run, restart crashed ones, stop all of them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arealite.api.fields import named, opt, sub
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.experiment_config import ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The components of a heterogeneous Slurm job, each with its sbatch options.

    A component without options runs on the nodes of `head`. Resources are per node.
    """

    every: list[str] = sub(list, "options of all components: [--account=a,--time=24:00:00]")
    head: list[str] = sub(lambda: ["--cpus-per-task=4"], "options of supervisor and datapipe")
    servers: list[str] = sub(list, "options of the LLM servers: [--nodes=4,--gres=gpu:8]")
    workers: list[str] = sub(list, "options of the workers: [--nodes=2,--partition=cpu]")
    trainers: list[str] = sub(list, "options of the trainer ranks: [--nodes=4,--gres=gpu:8]")
    start_s: float = opt(300.0, "time for nodes to respond; later ones are reported", above=0)


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Resources of each process in a Ray cluster. The datapipe runs beside the supervisor."""

    address: str = opt("auto", "address of the cluster; auto: $RAY_ADDRESS, or a local cluster")
    cpus: float = opt(1.0, "CPUs of each LLM server and rollout worker", at_least=0)
    server_gpus: float = opt(0.0, "GPUs of each LLM server: its tensor parallelism", at_least=0)
    trainer_cpus: float = opt(1.0, "CPUs of each trainer rank", at_least=0)
    trainer_gpus: float = opt(0.0, "GPUs of each trainer rank: 1 to train on GPUs", at_least=0)
    start_s: float = opt(300.0, "longest wait for the resources of all processes", above=0)


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """The processes of a run, the launcher, and the rules of restarts."""

    type: str = named("launcher", "local", "registered name of the launcher")
    trainer_ranks: int = opt(1, "number of trainer processes", at_least=1)
    rollout_workers: int = opt(1, "number of rollout workers", at_least=1)
    max_workers: int = opt(0, "limit of collector.autoscale; 0: rollout_workers", at_least=0)
    llm_servers: int = opt(0, "LLM servers to start with the run; 0: you start them", at_least=0)
    server_args: list[str] = sub(list, "options for serve-llm: [llm_server.type=sglang, …]")
    trainer_threads: int = opt(1, "torch threads of a trainer rank on a CPU", at_least=1)
    drain_timeout_s: float = opt(60.0, "time to finish a step and checkpoint after Ctrl-C", above=0)
    max_restarts: int = opt(5, "restarts of a role without a trained step in between", at_least=0)
    silent_s: float = opt(8.0, "restart a role after this long without a heartbeat", above=0)
    blocked_s: float = opt(60.0, "restart a role whose event loop is blocked this long", above=0)
    slurm: SlurmConfig = sub(SlurmConfig, "options of `arealite launch slurm`")
    ray: RayConfig = sub(RayConfig, "options of `arealite launch ray`")


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """The live page of a run."""

    web: bool = opt(False, "serve the run's report on loopback as it runs, and print its address")
    port: int = opt(0, "port of the live page; 0: any free port", at_least=0, at_most=65535)


class Launcher(ABC):
    """Starts the datapipe, the rollout workers and the trainer ranks of one experiment."""

    def __init__(self, config: "ExperimentConfig") -> None:
        self.config = config

    @abstractmethod
    def run(self) -> int:
        """Run the experiment to its end and stop every process that it started.

        Returns:
            The exit code: 0 after a complete run.
        """


launchers = Registry[type[Launcher]].built_in("launcher")
