"""Under which name a service shows a run: the same after each restart, and no other run's.

Beside the loggers of services, so that they agree.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml

from arealite.base.names import RunPaths


def run_id(run_root: Path) -> str:
    """Return the trial's name and when it was first started; the run's folder keeps it, so a trial
    that is begun anew has another."""
    file = RunPaths(run_root).logger_id
    if not file.exists():
        run_root.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{run_root.name[:40]}-{time.strftime('%Y%m%d-%H%M%S')}")
    return file.read_text()


def config_of(run_root: Path) -> dict[str, Any]:
    """Return the run's resolved config; {} before there is one."""
    file = RunPaths(run_root).config
    return yaml.safe_load(file.read_text("utf-8")) if file.exists() else {}
