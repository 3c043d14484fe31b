"""What a report says of a run as a whole: metrics, where time went, ages, the ledger's balance.

Read from the run's files alone, each of which may be lacking: a run that has just begun, or one
without a ledger, has a report, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from arealite.base.names import RunPaths
from arealite.impl.logger import names
from arealite.system.health.snapshot import Line, Metrics, is_step
from arealite.system.ledger.audit import TRAINED, audit
from arealite.system.ledger.ledger import connect

POINTS = 2000
"""Steps drawn at most; of more every second, third, … is."""
EPISODE = "episode/wait/"


def describe(paths: RunPaths) -> dict[str, Any]:
    """Return all of it, as a report's script takes it."""
    lines = Metrics(paths.metrics).poll()
    steps = [line for line in lines if is_step(line)]
    stride = max(1, -(-len(steps) // POINTS))
    told = {name: names.describe(name) for name in set[str]().union(*lines)}
    return {
        "name": "/".join(paths.root.absolute().parts[-2:]),
        "metrics": columns([*steps[:-1:stride], *steps[-1:]]),
        "stride": stride,
        "told": {name: text for name, text in told.items() if text},
        "evals": columns([line for line in lines if not is_step(line)]),
        "waits": {role: parts for role, parts in roles(steps).items() if any(parts.values())},
        "configs": read_configs(paths),
        "ledger": read_ledger(paths.ledger) if paths.ledger.exists() else None,
    }


def columns(lines: Sequence[Line]) -> dict[str, list[float | None]]:
    """Return lines by metric, None where a line has none."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [line.get(name) for line in lines] for name in names}


def roles(steps: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Return where each role's seconds went, by part; a role's parts are all of its time."""
    total = defaultdict[str, float](float)
    for line in steps:
        count = line.get("episode/trajectories", 0.0)
        for name, value in line.items():
            total[name] += value * (count if name.startswith("episode/") else 1.0)
    whole = total["time/step_s"]
    parts = {k.removeprefix(EPISODE): v for k, v in total.items() if k.startswith(EPISODE)}
    idle = worked = 0.0
    for before, line in pairwise(steps):
        waited = line.get("rollout/lease_wait_s", 0.0) - before.get("rollout/lease_wait_s", 0.0)
        seconds = line.get("time/step_s", 0.0) * line.get("rollout/workers", 0.0)
        idle += (part := min(max(waited, 0.0), seconds))
        worked += seconds - part
    groups, pace = total["datapipe/groups_wait_s"], total["datapipe/pace_wait_s"]
    stall = total["publish/stall_s"]
    trainer = {k[5:-2]: v for k, v in total.items() if k.startswith("time/")}
    trainer |= {f"{k[5:-2]} wait": v for k, v in total.items() if k.startswith("wait/")}
    trainer.pop("step", None)
    return {
        "trainer": trainer,
        "episodes": {
            **parts,
            "rest": max(0.0, total["episode/seconds_mean"] - sum(parts.values())),
        },
        "workers": {"full": worked, "lease wait": idle},
        "datapipe": {
            "groups wait": groups,
            "pace wait": pace,
            "trainer works": max(0.0, whole - groups - pace),
        },
        "servers": {"generate or idle": max(0.0, whole - stall), "weights wait": stall},
    }


def read_configs(paths: RunPaths) -> list[dict[str, Any]]:
    """Return the run's configs as they stand, each with the first step that it held for."""
    found = list[dict[str, Any]]()
    for step, file in (paths.starts or {0: paths.config}).items():
        with suppress(OSError, ValueError):
            text = file.read_text("utf-8")
            if not found or found[-1]["text"] != text:
                found.append({"step": step + 1, "text": text})
    return found


def read_ledger(ledger: Path) -> dict[str, Any]:
    """Return the audit, an example of each class of failure, and the ages of each step's batch."""
    report = audit(ledger, new_only=True)
    with closing(connect(ledger, read_only=True)) as db:
        examples = db.execute("SELECT class, MIN(detail) FROM failures GROUP BY class").fetchall()
        ages = db.execute(
            f"SELECT step + 1, step - oldest AS age, COUNT(*) FROM {TRAINED} GROUP BY step, age"
        ).fetchall()
    return {**asdict(report), "ok": report.ok, "examples": dict(examples), "ages": ages}
