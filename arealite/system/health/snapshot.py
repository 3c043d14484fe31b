"""What a run is doing, read from its files alone: config, metrics, names and vitals.

One reader for the launcher's console and `arealite top`, which may stand on another machine.
"""

from __future__ import annotations

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
from arealite.system.health.diagnosis import Finding, Role
from arealite.system.names.registry import Entry, NameRegistry

Line = dict[str, float]
WINDOW = 20
"""Steps over which rates and waits are told."""
QUIET_S = 120.0
"""A run of which no process shows itself is over when its files stand still for this long: it may
begin, or its vitals may not be seen from here."""
FAILED = "failed_"
"""How counters of failed episodes begin, in metrics and vitals."""
PUBLISHING = ("stage", "pause", "load", "continue", "stall")
"""Parts of a weight update, as metrics name them."""
CURVES = ("reward/mean", "train/loss", *(f"publish/{part}_s" for part in PUBLISHING))


class Metrics:
    """metrics.jsonl, read as it grows, and from its start when a resumed trainer writes it anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode = self._offset = 0
        self._read = set[float]()
        """Times of the lines so far: equal ones are one, but another host's clock orders none."""
        self._forget()

    def _forget(self) -> None:
        self.curves = defaultdict[str, list[float]](list)
        """Some metrics over all steps."""
        self.recent = deque[Line](maxlen=WINDOW)
        """The newest steps' lines."""
        self.evals = dict[int, Line]()
        """Held-out metrics, by step."""
        self.failures = Counter[str]()
        """Failed episodes by class."""

    @property
    def newest(self) -> Line:
        """The newest step's line; {} before the first."""
        return self.recent[-1] if self.recent else {}

    @property
    def steps(self) -> int:
        """How many are trained."""
        return int(self.newest.get("step", 0.0))

    def poll(self) -> list[Line]:
        """Take in what was written since the last call; return the lines never seen before."""
        found = list[Line]()
        try:
            with self._file.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset = stat.st_ino, 0
                    self._forget()
                file.seek(self._offset)
                lines = file.read().split(b"\n")
        except OSError:  # not there yet, or moved
            return found
        for line in lines[:-1]:
            self._offset += len(line) + 1
            with suppress(msgspec.DecodeError, KeyError):  # torn: its writer was killed
                metrics = msgspec.json.decode(line, type=dict[str, float])
                self._take(metrics)
                if metrics["time"] not in self._read:
                    self._read.add(metrics["time"])
                    found.append(metrics)
        return found

    def _take(self, line: Line) -> None:
        if not is_step(line):
            self.evals[int(line["step"])] = line
            return
        if line["step"] == self.steps:  # written by 0.1.0, which counted from 0
            line["step"] += 1
        for key, value in line.items():
            if key in CURVES:
                self.curves[key].append(value)
            if key.startswith(f"rollout/{FAILED}") and key.count("/") == 1:  # else of one source
                # A worker that was started again counts anew.
                more = max(0, int(value - self.newest.get(key, 0.0)))
                self.failures[key.removeprefix(f"rollout/{FAILED}")] += more
        self.recent.append(line)


def is_step(line: Mapping[str, float]) -> bool:
    """Tell a trained step's line from an evaluation's."""
    return "reward/mean" in line or "train/epoch" in line


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment."""

    name: str
    """Experiment and trial, as in "demo/seed2"."""
    kind: str
    """Of trainer, as in "async_ppo"."""
    state: Literal["running", "finished", "not running"]
    total_steps: int
    """0: not known yet."""
    metrics: Metrics
    """So far; they grow with the next reading."""
    failures: Mapping[str, int]
    """Failed episodes by class, as workers count them: those of a process that died since the last
    step are not among them."""
    servers: Sequence[Entry]
    findings: Sequence[Finding]
    """Who holds the run up, worst first."""


class Watch:
    """Reads one run as often as it is asked to."""

    def __init__(self, paths: RunPaths) -> None:
        """Read nothing but the config.

        Raises:
            UserError: the folder is no run's.
        """
        self.paths = paths
        self.metrics = Metrics(paths.metrics)
        self.is_over = False
        """Whether nothing more was to be expected when it was last read."""
        self._read_config()

    def read(self) -> Snapshot:
        """Read what there is; what is away for a moment is as it was."""
        with suppress(UserError, OSError):  # begun anew, moved, or its disk is away
            if self.paths.config.stat().st_mtime != self._changed:
                self._read_config()
        self.metrics.poll()
        metrics, config = self.metrics, self._config
        servers = self._names.list("llm_server")
        roles, failures = diagnosis.read(self._vitals), Counter[str]()
        for role in roles:
            of_role = {k: int(v) for k, v in role.vitals.counters.items() if k.startswith(FAILED)}
            failures.update({k.removeprefix(FAILED): v for k, v in of_role.items()})
        living = {role.name.partition("-")[0] for role in roles if is_alive(role)} - {"llm_server"}
        is_offline = TrainerConfig(type=config.trainer.type).is_offline  # then its metrics tell
        total = 0 if is_offline else config.trainer.ppo.total_steps
        total = int(metrics.newest.get("train/total_steps", total))
        is_trained = 0 < total <= metrics.steps
        findings = diagnosis.examine(self._vitals, known=roles) if living else []
        is_running = any(f.cause in ("crashing", "starting") for f in findings)
        is_running |= bool(living - {"launcher"})
        self.is_over = not living and (is_trained or self._is_quiet())
        return Snapshot(
            name=f"{config.experiment_name}/{config.trial_name}",
            kind=config.trainer.type,
            state="running" if is_running else "finished" if is_trained else "not running",
            total_steps=total,
            metrics=metrics,
            failures=metrics.failures | failures,
            servers=servers,
            findings=findings if is_running else [],
        )

    def _read_config(self) -> None:
        """Take the config as it stands: what `imports` names may not be found from here."""
        file = self.paths.config
        config = base_config.read(file) if file.exists() else DictConfig({})
        if not config.keys() >= {"experiment_name", "trial_name", "trainer", "cluster"}:
            raise UserError(
                f"{file.parent} is no run: it has no {file.name} of one. "
                "Name a run's folder, as in runs/EXPERIMENT/TRIAL."
            )
        filled = OmegaConf.merge({"cluster": asdict(ClusterConfig())}, config)  # an older one's
        self._config, self._changed = cast(ExperimentConfig, filled), file.stat().st_mtime
        self._names = NameRegistry.of(self._config)
        self._vitals = name_dir(self._config) / "vitals"

    def _is_quiet(self) -> bool:
        """Whether the files of a run whose processes are not seen stand still for long."""
        written = self._changed
        with suppress(OSError):
            written = max(written, self.paths.metrics.stat().st_mtime)
        return folder_time(self.paths.root) - written > QUIET_S


def is_alive(role: Role) -> bool:
    """Whether a process exists, as far as can be seen."""
    return role.state not in "XZ" if role.state else role.age_s < diagnosis.FORGOTTEN_S
