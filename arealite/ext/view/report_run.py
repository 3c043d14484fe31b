"""A report's data on the whole run: metrics, where time went, ages, the ledger's balance.

The source is the run's files, each of which may be missing: a report can be written of a run that
has just begun, or that has no ledger.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from arealite.base.files import read_toml
from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.ext.audit.audit_queries import TRAINED
from arealite.ext.view import metric_names as names
from arealite.ext.view.snapshot import MetricsLine, MetricsReader, is_step
from arealite.system.ledger.ledger import connect

POINTS = 2000
"""Maximum number of steps drawn; of a longer run, every second, third, … step is drawn."""
AGES = 7
"""Ages of tokens, in versions, that the report counts apart; older ones are one band."""
EPISODE = "episode/wait/"
LABELS = read_toml(__file__, "report.toml")
"""Titles of charts and groups of metrics, and words for roles and their times."""


def describe(paths: RunPaths) -> dict[str, Any]:
    """Return the data on the whole run that the report's scripts read."""
    lines = MetricsReader(paths.metrics).poll()
    steps = [line for line in lines if is_step(line)]
    evals = [line for line in lines if not is_step(line)]
    stride = max(1, math.ceil(len(steps) / POINTS))
    # The newest step is drawn in any case.
    earlier_steps = steps[:-1:stride]
    newest_step = steps[-1:]
    ledger = None
    if paths.ledger.exists():
        ledger = read_ledger(paths.ledger)
    waits = {role: parts for role, parts in roles(steps).items() if any(parts.values())}
    return {
        "name": run_name(paths),
        "metrics": columns([*evals, *earlier_steps, *newest_step]),
        "stride": stride,
        "labels": LABELS,
        "descriptions": _descriptions(lines),
        "waits": waits,
        "configs": read_configs(paths),
        "ledger": ledger,
    }


def run_name(paths: RunPaths) -> str:
    """Return the name of a run: EXPERIMENT/TRIAL."""
    return "/".join(paths.root.absolute().parts[-2:])


def _descriptions(lines: Sequence[MetricsLine]) -> dict[str, str]:
    """Return the description of each metric of a run that has one."""
    metric_names = set[str]().union(*lines)
    descriptions = {name: names.describe(name) for name in metric_names}
    return {name: description for name, description in descriptions.items() if description}


def columns(lines: Sequence[MetricsLine]) -> dict[str, list[float | None]]:
    """Return one list per metric, by ascending step; None where a step lacks the metric."""
    metric_names = dict.fromkeys(name for line in lines for name in line)
    merged = by_step(lines)
    return {name: [line.get(name) for line in merged] for name in metric_names}


def by_step(lines: Iterable[MetricsLine]) -> list[MetricsLine]:
    """Return one line for each step, in their order: metrics and evaluations together."""
    rows = defaultdict[float, MetricsLine](dict)
    for line in lines:
        rows[line["step"]] |= line
    return [rows[step] for step in sorted(rows)]


def roles(steps: Sequence[MetricsLine]) -> dict[str, dict[str, float]]:
    """Return each role's seconds by part; the parts add up to the role's whole time."""
    total = defaultdict[str, float](float)
    for line in steps:
        num_trajectories = line.get("episode/trajectories", 0.0)
        for name, number in line.items():
            if name.startswith("episode/"):  # the mean of the episodes
                total[name] += number * num_trajectories
            else:
                total[name] += number
    whole = total["time/step_s"]
    groups_wait = total["datapipe/groups_wait_s"]
    slow_wait = total["datapipe/slow_episodes_wait_s"]
    weights_wait = total["publish/stall_s"]
    return {
        "trainer": _trainer_seconds(total),
        "episodes": _episode_seconds(total),
        "workers": _worker_seconds(steps),
        "datapipe": {
            "groups wait": groups_wait,
            "slow wait": slow_wait,
            "trainer works": max(0.0, whole - groups_wait - slow_wait),
        },
        "servers": {
            "generate or idle": max(0.0, whole - weights_wait),
            "weights wait": weights_wait,
        },
    }


def _trainer_seconds(total: Mapping[str, float]) -> dict[str, float]:
    """Return the trainer's seconds by part: its work first, then its waits."""
    parts = dict[str, float]()
    waits = dict[str, float]()
    for name, seconds in total.items():
        group, slash, part = name.partition("/")
        part = part.removesuffix("_s")
        if not slash:
            continue
        if group == "time":
            parts[part] = seconds
        elif group == "wait":
            waits[f"{part} wait"] = seconds
    parts.pop("step", None)  # the sum of all others
    return parts | waits


def _episode_seconds(total: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of all episodes by part; "rest" is their time outside the named waits."""
    parts = {
        name.removeprefix(EPISODE): seconds
        for name, seconds in total.items()
        if name.startswith(EPISODE)
    }
    all_seconds = total.get("episode/seconds_mean", 0.0)
    named_seconds = sum(parts.values())
    parts["rest"] = max(0.0, all_seconds - named_seconds)
    return parts


def _worker_seconds(steps: Sequence[MetricsLine]) -> dict[str, float]:
    """Return the seconds in which workers were full, and in which they waited for a lease."""
    idle = 0.0
    full = 0.0
    for before, line in pairwise(steps):
        waited_before = before.get("rollout/lease_wait_s", 0.0)
        waited = line.get("rollout/lease_wait_s", 0.0) - waited_before
        num_workers = line.get("rollout/workers", 0.0)
        seconds = line.get("time/step_s", 0.0) * num_workers
        idle_seconds = max(waited, 0.0)
        idle_seconds = min(idle_seconds, seconds)
        idle += idle_seconds
        full += seconds - idle_seconds
    return {"full": full, "lease wait": idle}


def read_configs(paths: RunPaths) -> list[dict[str, object]]:
    """Return the text of each config of the run, with the first step that it applied to."""
    configs = list[dict[str, object]]()
    config_files = paths.starts or {0: paths.config}
    for step, file in config_files.items():
        with suppress(OSError, ValueError):
            yaml = file.read_text("utf-8")
            if not configs or configs[-1]["text"] != yaml:
                configs.append({"step": step + 1, "text": yaml})
    return configs


def read_ledger(ledger: Path) -> dict[str, object]:
    """Return the audit, an example of each class of failure, and the ages of tokens by step.

    `ages` has a list of steps, then one list per age: the number of the step's trajectories whose
    oldest token was at most so many versions old when it was trained. The last list counts all.
    """
    report = audit(ledger, new_only=True)
    with closing(connect(ledger, read_only=True)) as db:
        select = "SELECT class, MIN(detail) FROM failures GROUP BY class"
        examples = dict(db.execute(select).fetchall())
        younger = [f"SUM(step - oldest <= {age})" for age in range(AGES)]
        counts = ", ".join([*younger, "COUNT(*)"])
        select = f"SELECT step + 1, {counts} FROM {TRAINED} GROUP BY step"
        ages_of_steps = db.execute(select).fetchall()
    return {
        **asdict(report),
        "ok": report.ok,
        "examples": examples,
        "ages": list(zip(*ages_of_steps, strict=True)),
    }
