"""The two root configs: an experiment (`train.py`) and a server (`launch_llm_server`).

Config classes hold all defaults. YAML files hold only values that differ from them.
"""

import getpass
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arealite.api.fields import Constraints, PublisherOptions, named, opt, sub
from arealite.api.launcher import LauncherConfig, ViewConfig
from arealite.api.llm_server import ExternalServersConfig, LLMServerConfig
from arealite.api.publisher import publishers
from arealite.api.trainer import TrainerConfig
from arealite.api.trial import TrialConfig
from arealite.base.folder_checks import check_name
from arealite.base.trial_files import RunPaths


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """The curriculum: tasks of classes with a success rate near 0.5 are drawn more often.

    The probability of a class is proportional to its rows times floor + (1 - floor)·4p(1 - p),
    where p is its success rate.
    """

    by: str = opt("", "key of extra_info with a task's class, like level or env; '': off")
    threshold: float = opt(0.5, "an episode with at least this reward is a success")
    floor: float = opt(0.1, "weight at success rates 0 and 1; 1: no curriculum", above=0, at_most=1)
    window: int = opt(32, "newest groups of a class that count for its success rate", at_least=1)


@dataclass(frozen=True, kw_only=True)
class DatapipeConfig:
    """The process between rollout workers and trainer."""

    lease_ttl_s: float = opt(15.0, "silence until a worker's leases are offered again", above=0)
    commit_interval_s: float = opt(
        0.05, "time between ledger commits; results that a batch needs commit at once", at_least=0
    )
    max_failed_share: float = opt(0.5, "stop if more of the last 256 episodes failed", at_least=0)
    max_filtered_groups: int = opt(
        1000, "stop after this many filtered groups without a complete one; 0: never", at_least=0
    )
    stall_timeout_s: float = opt(300.0, "stop if no leased episode finishes for this long", above=0)
    keep_payloads: str = opt(
        "all",
        "payloads (tokens) in the ledger: all, for replay and report of every step; a number N "
        "drops those of steps older than the N newest checkpoints",
    )
    max_frame_mb: int = opt(64, "larger trajectories fail; 12 bytes a sampled token", at_least=1)
    curriculum: CurriculumConfig = sub(CurriculumConfig, "order of tasks by success rate")

    def constraints(self) -> Constraints:
        """Yield the constraint on `keep_payloads`."""
        is_valid = re.fullmatch(r"all|[1-9]\d{0,8}", self.keep_payloads) is not None
        yield (
            is_valid,
            f"keep_payloads={self.keep_payloads}: use all, or a number of at least 1.",
        )


@dataclass(frozen=True, kw_only=True)
class ServedModelConfig:
    """The model of a server."""

    path: str = opt("", "Hugging Face folder, id on its hub, or GGUF file; required")
    dtype: str = opt(
        "float32",
        "data type of a server's weights; auto: bfloat16 if this machine has a GPU or "
        "processor with it, else float32",
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ServedModelConfig):
    """The model of servers and trainer."""

    adapter: str | None = opt(
        None, "LoRA adapter that peft wrote, to start from; its rank, alpha and targets apply"
    )


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Rows in a form that docs/data.md lists: usually `prompt`, `ground_truth`, `extra_info`."""

    train: str = opt(
        "",
        "training rows: a file, a `datasets` folder or a hub id (sft also reads a run's folder); "
        "or `generated`: the environment makes them; required",
    )
    eval: str | None = opt(None, "path of the held-out rows, or `generated`; null: no evaluation")
    columns: dict[str, str] = sub(
        dict, "names of the files' columns by ours: {prompt: question, ground_truth: answer}"
    )
    rows: int = opt(4096, "training rows to generate, or to draw from all environments", at_least=1)
    eval_rows: int = opt(256, "held-out rows to generate, or to draw", at_least=1)
    shuffle: bool = opt(True, "shuffle the rows each epoch, in an order given by the seed")


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Metric loggers besides metrics.jsonl, and the log level."""

    types: list[str] = named(
        "logger",
        lambda: ["tensorboard"],
        "tensorboard, wandb, trackio, or registered names; []: none",
    )
    level: Literal["debug", "info", "warning", "error"] = opt("info", "log level of every role")


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig(TrialConfig):
    """Root of `train.py`."""

    resume: str = opt(
        "auto",
        "auto: newest checkpoint, or a new run; must: newest checkpoint; never: new run, the old "
        "folder is renamed; step-40: that checkpoint",
    )
    server_wait_s: float = opt(60.0, "longest wait for the first LLM server", at_least=0)
    model: ModelConfig = sub(ModelConfig, "the model")
    dataset: DatasetConfig = sub(DatasetConfig, "the tasks")
    llm_server: ExternalServersConfig = sub(ExternalServersConfig, "external servers")
    trainer: TrainerConfig = sub(TrainerConfig, "the trainer")
    datapipe: DatapipeConfig = sub(DatapipeConfig, "the datapipe")
    launcher: LauncherConfig = sub(LauncherConfig, "the processes of the run")
    logger: LoggerConfig = sub(LoggerConfig, "metrics and logs")
    view: ViewConfig = sub(ViewConfig, "the live page")

    @property
    def evaluates(self) -> bool:
        """Whether the run has held-out rows."""
        if self.dataset.eval is not None:
            return True
        parts = self.trainer.ppo.collector.envs.values()
        return any(part.eval for part in parts)

    def constraints(self) -> Constraints:
        """Yield the constraints between sections, for a run with servers and workers."""
        trainer = self.trainer
        max_staleness = trainer.ppo.max_staleness
        is_synchronous = trainer.type == "ppo"
        yield (
            max_staleness == 0 or not is_synchronous,
            (
                f"trainer.type=ppo is synchronous, but max_staleness is {max_staleness}. "
                "Use trainer.ppo.max_staleness=0, or trainer.type=async_ppo."
            ),
        )
        max_workers = self.launcher.max_workers
        min_workers = self.launcher.rollout_workers
        is_scalable = max_workers >= min_workers and trainer.ppo.collector.autoscale.enabled
        yield (
            max_workers == 0 or is_scalable,
            (
                f"launcher.max_workers={max_workers} "
                f"must be at least launcher.rollout_workers={min_workers}, "
                "and needs collector.autoscale.enabled=true. "
                "Use 0 for a fixed number of workers."
            ),
        )
        options = publishers.options(trainer.ppo.publisher)
        if isinstance(options, PublisherOptions):
            yield from options.run_constraints(self)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(TrialConfig):
    """Root of `launch_llm_server`. The names are those of the experiment that uses the server."""

    model: ServedModelConfig = sub(ServedModelConfig, "the model")
    llm_server: LLMServerConfig = sub(LLMServerConfig, "the server")

    @property
    def reachable_host(self) -> str:
        """The address under which clients reach a server that binds `llm_server.host`."""
        host = self.llm_server.host
        return self.cluster.host if host in ("0.0.0.0", "::", "") else host


def run_paths(config: TrialConfig) -> RunPaths:
    """Return the paths of the trial's files."""
    root = Path(config.cluster.run_root).expanduser().absolute()
    return RunPaths(root / config.experiment_name / config.trial_name)


def name_dir(config: TrialConfig) -> Path:
    """Return the trial's folder in the name registry.

    Raises:
        UserError: The name of experiment, trial or user is no valid folder name.
    """
    check_name("experiment_name", config.experiment_name)
    check_name("trial_name", config.trial_name)
    check_name("cluster.user", config.cluster.user or "root")
    user = config.cluster.user or getpass.getuser()
    root = Path(config.cluster.name_root).expanduser().absolute()
    return root / user / config.experiment_name / config.trial_name
