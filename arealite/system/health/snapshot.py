"""State of a run, read from its files: config, metrics, names and vitals.

The launcher's console and `arealite top`, which may run on another machine, use this reader.
"""

import os
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

import msgspec
from omegaconf import DictConfig, OmegaConf

from arealite.api.config import ExperimentConfig, name_dir
from arealite.api.trainer import TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.system.clocks import folder_time
from arealite.system.health import diagnosis
from arealite.system.health.diagnosis import Finding, RoleStatus
from arealite.system.names.registry import Entry, NameRegistry

Line = dict[str, float]
WINDOW = 20
"""Number of steps over which rates and waits are averaged."""
QUIET_S = 120.0
"""A run without visible processes is over when its files did not change for this long. Before, it
may be starting, or its vitals may not be visible from this host."""
FAILED = "failed_"
"""Prefix of the counters of failed episodes, in metrics and vitals."""
PUBLISHING = ("stage", "pause", "load", "continue", "stall")
"""Parts of a weight update, as in names of metrics."""
STEP_METRICS = "time/step_s", "reward/mean", "reward/unscored", "train/epoch"
"""Each trained step has one of these metrics."""
CURVES = ("reward/mean", "train/loss", *(f"publish/{part}_s" for part in PUBLISHING))


class Metrics:
    """Reads metrics.jsonl as it grows; from its start when a resumed trainer rewrites it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode = self._offset = 0
        self._seen_times = set[float]()
        """Times of all lines read. A line with a known time was read before; times are not
        compared otherwise, because the hosts' clocks may differ."""
        self._reset()

    def _reset(self) -> None:
        self.curves = defaultdict[str, list[float]](list)
        """The metrics of CURVES over all steps."""
        self.recent = deque[Line](maxlen=WINDOW)
        """Lines of the newest steps."""
        self.evals = dict[int, Line]()
        """Held-out metrics, by step."""
        self.failures = Counter[str]()
        """Failed episodes by class."""

    @property
    def newest(self) -> Line:
        """Line of the newest step; {} before the first."""
        return self.recent[-1] if self.recent else {}

    @property
    def steps(self) -> int:
        """Number of trained steps."""
        return int(self.newest.get("step", 0.0))

    def poll(self) -> list[Line]:
        """Read the lines written since the last call; return those never read before."""
        found = list[Line]()
        try:
            with self._file.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode = stat.st_ino
                    self._offset = 0
                    self._reset()
                file.seek(self._offset)
                lines = file.read().split(b"\n")
        except OSError:  # not written yet, or moved
            return found
        for line in lines[:-1]:
            self._offset += len(line) + 1
            with suppress(msgspec.DecodeError, KeyError):  # incomplete: its writer was killed
                metrics = msgspec.json.decode(line, type=dict[str, float])
                self._add_line(metrics)
                if metrics["time"] not in self._seen_times:
                    self._seen_times.add(metrics["time"])
                    found.append(metrics)
        return found

    def _add_line(self, line: Line) -> None:
        if not is_step(line):
            self.evals[int(line["step"])] = line
            return
        if line["step"] == self.steps:  # written by 0.1.0, which counted from 0
            line["step"] += 1
        for key, value in line.items():
            if key in CURVES:
                self.curves[key].append(value)
            if key.startswith(f"rollout/{FAILED}") and key.count("/") == 1:  # not of one source
                # A restarted worker counts from 0.
                more = max(0, int(value - self.newest.get(key, 0.0)))
                self.failures[key.removeprefix(f"rollout/{FAILED}")] += more
        self.recent.append(line)


def is_step(line: Mapping[str, float]) -> bool:
    """Return whether a line is of a trained step, and not of an evaluation."""
    return not line.keys().isdisjoint(STEP_METRICS)


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
    metrics: Metrics
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
        self.metrics = Metrics(paths.metrics)
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
        roles = diagnosis.read_roles(self._vitals)
        failures = Counter[str]()
        for role in roles:
            of_role = {k: int(v) for k, v in role.vitals.counters.items() if k.startswith(FAILED)}
            failures.update({k.removeprefix(FAILED): v for k, v in of_role.items()})
        living = {role.name.partition("-")[0] for role in roles if is_alive(role)} - {"llm_server"}
        is_offline = TrainerConfig(type=config.trainer.type).is_offline  # metrics have its total
        total = 0 if is_offline else config.trainer.ppo.total_steps
        total = int(metrics.newest.get("train/total_steps", total))
        is_trained = 0 < total <= metrics.steps
        findings = diagnosis.examine(self._vitals, known=roles) if living else []
        is_running = any(f.cause in ("crashing", "starting") for f in findings)
        is_running |= bool(living - {"launcher"})
        self.is_over = not living and (is_trained or self._is_quiet())
        now = starting(roles, has_servers=bool(servers)) if is_running and not metrics.steps else ""
        return Snapshot(
            name=f"{config.experiment_name}/{config.trial_name}",
            kind=config.trainer.type,
            state="running" if is_running else "finished" if is_trained else "not running",
            total_steps=total,
            metrics=metrics,
            failures=metrics.failures | failures,
            servers=servers,
            findings=findings if is_running else [],
            now=now,
        )

    def _read_config(self) -> None:
        """Read the config without `imports`, which may not be importable here."""
        file = self.paths.config
        config = base_config.read(file) if file.exists() else DictConfig({})
        if not config.keys() >= {"experiment_name", "trial_name", "trainer", "cluster"}:
            what = f"{file.parent} is no run folder: it has no valid {file.name}"
            raise UserError(f"{what}. Give a run folder, as in runs/EXPERIMENT/TRIAL.")
        filled = OmegaConf.merge({"cluster": asdict(ClusterConfig())}, config)  # an older version's
        self._config = cast(ExperimentConfig, filled)
        self._changed = file.stat().st_mtime
        self._names = NameRegistry.of(self._config)
        self._vitals = name_dir(self._config) / "vitals"

    def _is_quiet(self) -> bool:
        """Return whether the run's files did not change for QUIET_S."""
        written = self._changed
        with suppress(OSError):
            written = max(written, self.paths.metrics.stat().st_mtime)
        return folder_time(self.paths.root) - written > QUIET_S


def starting(roles: Sequence[RoleStatus], *, has_servers: bool) -> str:
    """Return what a run does before its first step: the wait of its trainer, or the start."""
    trainer = next((role for role in roles if role.name == "trainer-0" and is_alive(role)), None)
    if trainer is None:
        return "the processes start"
    for wait in trainer.vitals.waits:
        if wait.on == "datapipe-0" and not has_servers:
            return "the trainer is ready; no language-model server has started yet"
        return wait.detail or f"the trainer waits for {wait.what} of {wait.on or 'any process'}"
    return "the trainer loads the model"


def is_alive(role: RoleStatus) -> bool:
    """Return whether a process exists; on another host, whether its heartbeat is recent."""
    return role.state not in "XZ" if role.state else role.age_s < diagnosis.FORGET_DEAD_S
