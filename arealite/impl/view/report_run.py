"""A report's data on the whole run: metrics, where time went, ages, the ledger's balance.

The source is the run's files, each of which may be missing: a report can be written of a run that
has just begun, or that has no ledger.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from arealite.base.data import read_toml
from arealite.base.names import RunPaths
from arealite.impl.logger import names
from arealite.system.health.snapshot import Line, Metrics, is_step
from arealite.system.ledger.audit import TRAINED, audit
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
    lines = Metrics(paths.metrics).poll()
    steps = [line for line in lines if is_step(line)]
    stride = max(1, -(-len(steps) // POINTS))
    evals = [line for line in lines if not is_step(line)]
    descriptions = {name: names.describe(name) for name in set[str]().union(*lines)}
    return {
        "name": "/".join(paths.root.absolute().parts[-2:]),
        "metrics": columns([*evals, *steps[:-1:stride], *steps[-1:]]),
        "stride": stride,
        "labels": LABELS,
        "descriptions": {name: text for name, text in descriptions.items() if text},
        "waits": {role: parts for role, parts in roles(steps).items() if any(parts.values())},
        "configs": read_configs(paths),
        "ledger": read_ledger(paths.ledger) if paths.ledger.exists() else None,
    }


def columns(lines: Sequence[Line]) -> dict[str, list[float | None]]:
    """Return one list per metric, by ascending step; None where a step lacks the metric."""
    names = dict.fromkeys(name for line in lines for name in line)
    merged = by_step(lines)
    return {name: [line.get(name) for line in merged] for name in names}


def by_step(lines: Iterable[Line]) -> list[Line]:
    """Return one line for each step, in their order: metrics and evaluations together."""
    rows = defaultdict[float, Line](dict)
    for line in lines:
        rows[line["step"]] |= line
    return [rows[step] for step in sorted(rows)]


def roles(steps: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Return each role's seconds by part; the parts add up to the role's whole time."""
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
    groups = total["datapipe/groups_wait_s"]
    # Version 0.1.0 named the wait for slow episodes "pace".
    slow = sum(total[f"datapipe/{cause}_wait_s"] for cause in ("slow_episodes", "pace"))
    stall = total["publish/stall_s"]
    trainer = {k[5:-2]: v for k, v in total.items() if k.startswith("time/")}
    trainer |= {f"{k[5:-2]} wait": v for k, v in total.items() if k.startswith("wait/")}
    trainer.pop("step", None)
    parts["rest"] = max(0.0, total["episode/seconds_mean"] - sum(parts.values()))
    works = max(0.0, whole - groups - slow)
    return {
        "trainer": trainer,
        "episodes": parts,
        "workers": {"full": worked, "lease wait": idle},
        "datapipe": {"groups wait": groups, "slow wait": slow, "trainer works": works},
        "servers": {"generate or idle": max(0.0, whole - stall), "weights wait": stall},
    }


def read_configs(paths: RunPaths) -> list[dict[str, object]]:
    """Return the text of each config of the run, with the first step that it applied to."""
    found = list[dict[str, object]]()
    for step, file in (paths.starts or {0: paths.config}).items():
        with suppress(OSError, ValueError):
            text = file.read_text("utf-8")
            if not found or found[-1]["text"] != text:
                found.append({"step": step + 1, "text": text})
    return found


def read_ledger(ledger: Path) -> dict[str, object]:
    """Return the audit, an example of each class of failure, and the ages of tokens by step.

    `ages` has a list of steps, then one list per age: the number of the step's trajectories whose
    oldest token was at most so many versions old when it was trained. The last list counts all.
    """
    report = audit(ledger, new_only=True)
    with closing(connect(ledger, read_only=True)) as db:
        examples = db.execute("SELECT class, MIN(detail) FROM failures GROUP BY class").fetchall()
        younger = ", ".join(f"SUM(step - oldest <= {age})" for age in range(AGES))
        select = f"SELECT step + 1, {younger}, COUNT(*) FROM {TRAINED} GROUP BY step"
        ages = db.execute(select).fetchall()
    found = {"examples": dict(examples), "ages": list(zip(*ages, strict=True))}
    return {**asdict(report), "ok": report.ok, **found}
