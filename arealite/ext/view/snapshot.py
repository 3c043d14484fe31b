"""State of a run, read from its files: config, metrics, names and vitals.

The panel of the launcher and `arealite top`, which may run on another machine, use this reader.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal, cast

from omegaconf import DictConfig, OmegaConf

from arealite.api.experiment_config import ExperimentConfig, name_dir
from arealite.api.findings import Finding
from arealite.api.trainer import TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.files import folder_time
from arealite.base.trial_files import RunPaths
from arealite.ext.diagnosis import diagnosis
from arealite.impl.logger.metrics_file import MetricsFile, MetricsLine, is_step
from arealite.system.health.vitals import RoleStatus, read_roles
from arealite.system.names.name_registry import Entry, NameRegistry

WINDOW = 20
"""Number of steps over which rates and waits are averaged."""
QUIET_S = 120.0
"""A run without visible processes is over when its files did not change for this long. Before, it
may be starting, or its vitals may not be visible from this host."""
FAILED = "failed_"
"""Prefix of the counters of failed episodes, in metrics and vitals."""
PUBLISHING = ("stage", "pause", "load", "continue", "stall")
"""Parts of a weight update, as in names of metrics."""
CURVES = ("reward/mean", "train/loss", *(f"publish/{part}_s" for part in PUBLISHING))


class MetricsReader(MetricsFile):
    """Reads metrics.jsonl as it grows, and keeps what the panel shows."""

    def reset(self) -> None:
        super().reset()
        self.curves = defaultdict[str, list[float]](list)
        """The metrics of CURVES over all steps."""
        self.recent = deque[MetricsLine](maxlen=WINDOW)
        """Lines of the newest steps."""
        self.evals = dict[int, MetricsLine]()
        """Held-out metrics, by step."""
        self.failures = Counter[str]()
        """Failed episodes by class."""

    @property
    def newest(self) -> MetricsLine:
        """Line of the newest step; {} before the first."""
        return self.recent[-1] if self.recent else {}

    def add(self, line: MetricsLine) -> None:
        super().add(line)
        if not is_step(line):
            self.evals[int(line["step"])] = line
            return
        for metric, number in line.items():
            if metric in CURVES:
                self.curves[metric].append(number)
            self._count_failures(metric, number)
        self.recent.append(line)

    def _count_failures(self, metric: str, number: float) -> None:
        """Add the increase of a counter of failed episodes; other metrics are ignored."""
        prefix = f"rollout/{FAILED}"
        is_of_one_source = metric.count("/") > 1
        if metric.startswith(prefix) and not is_of_one_source:
            increase = int(number - self.newest.get(metric, 0.0))
            # A restarted worker counts from 0.
            self.failures[metric.removeprefix(prefix)] += max(0, increase)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment."""

    name: str
    """Experiment and trial, as in "demo/seed2"."""
    kind: str
    """Type of the trainer, as in "async_ppo"."""
    state: Literal["running", "finished", "not running"]
    total_steps: int
    """0: unknown."""
    metrics: MetricsReader
    """Shared with later snapshots, so it grows."""
    failures: Mapping[str, int]
    """Failed episodes by class, counted by workers. Failures in a process that died after the last
    step are missing."""
    servers: Sequence[Entry]
    findings: Sequence[Finding]
    """The blocking roles, the worst first."""
    now: str = ""
    """The present activity of a run before its first step; "" after it."""


class RunReader:
    """Reads the state of one run, repeatedly."""

    def __init__(self, paths: RunPaths) -> None:
        """Read the config.

        Raises:
            UserError: the folder is no run folder.
        """
        self.paths = paths
        self.metrics = MetricsReader(paths.metrics)
        self.is_over = False
        """Whether the run had ended when it was last read."""
        self._read_config()

    def read(self) -> Snapshot:
        """Return the present state; files that cannot be read keep their last content."""
        with suppress(UserError, OSError):  # restarted, moved, or its disk is not mounted
            if self.paths.config.stat().st_mtime != self._changed:
                self._read_config()
        self.metrics.poll()
        metrics = self.metrics
        config = self._config
        servers = self._names.list("llm_server")
        roles = read_roles(self._vitals)
        living = [role for role in roles if role.is_alive]
        living_kinds = {role.name.partition("-")[0] for role in living}
        living_kinds -= {"llm_server"}  # a server may outlive its run
        total_steps = self._total_steps()
        is_trained = 0 < total_steps <= metrics.steps
        findings = diagnosis.examine(self._vitals, roles=roles) if living_kinds else []
        is_starting = any(finding.cause in ("crashing", "starting") for finding in findings)
        is_running = is_starting or bool(living_kinds - {"launcher"})
        self.is_over = not living_kinds and (is_trained or self._is_quiet())
        now = ""
        if is_running and not metrics.steps:
            now = starting(roles, has_servers=bool(servers))
        return Snapshot(
            name=f"{config.experiment_name}/{config.trial_name}",
            kind=config.trainer.type,
            state="running" if is_running else "finished" if is_trained else "not running",
            total_steps=total_steps,
            metrics=metrics,
            failures=metrics.failures | _failures_by_class(roles),
            servers=servers,
            findings=findings if is_running else [],
            now=now,
        )

    def _total_steps(self) -> int:
        """Return the number of steps of the run; 0 if it is not known yet."""
        trainer = self._config.trainer
        is_offline = TrainerConfig(type=trainer.type).is_offline
        # Only the metrics of an offline run have its number of steps.
        configured = 0 if is_offline else trainer.ppo.total_steps
        return int(self.metrics.newest.get("train/total_steps", configured))

    def _read_config(self) -> None:
        """Read the config without `imports`, which may not be importable here."""
        file = self.paths.config
        config = base_config.read(file) if file.exists() else DictConfig({})
        if not config.keys() >= {"experiment_name", "trial_name", "trainer", "cluster"}:
            raise UserError(
                f"{file.parent} is no run folder: it has no valid {file.name}. "
                "Give a run folder, as in runs/EXPERIMENT/TRIAL."
            )
        # The config of an older version may lack options of the cluster.
        default_cluster = asdict(ClusterConfig())
        self._config = cast(ExperimentConfig, OmegaConf.merge({"cluster": default_cluster}, config))
        self._changed = file.stat().st_mtime
        self._names = NameRegistry.of(self._config)
        self._vitals = name_dir(self._config) / "vitals"

    def _is_quiet(self) -> bool:
        """Return whether the run's files did not change for QUIET_S."""
        changed = self._changed
        with suppress(OSError):
            changed = max(changed, self.paths.metrics.stat().st_mtime)
        return folder_time(self.paths.root) - changed > QUIET_S


def _failures_by_class(roles: Sequence[RoleStatus]) -> Counter[str]:
    """Return the failed episodes by class, as the workers count them."""
    failures = Counter[str]()
    for role in roles:
        for counter, number in role.vitals.counters.items():
            if counter.startswith(FAILED):
                failures[counter.removeprefix(FAILED)] += int(number)
    return failures


def starting(roles: Sequence[RoleStatus], *, has_servers: bool) -> str:
    """Return what a run does before its first step: the wait of its trainer, or the start."""
    trainers = [role for role in roles if role.name == "trainer-0" and role.is_alive]
    if not trainers:
        return "the processes start"
    for wait in trainers[0].vitals.waits:
        if wait.on == "datapipe-0" and not has_servers:
            return "the trainer is ready; no language-model server has started yet"
        return wait.detail or f"the trainer waits for {wait.event} of {wait.on or 'any process'}"
    return "the trainer loads the model"
