"""`arealite why RUN`: find the process that blocks a run; print the state of every role."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from arealite.api.experiment_config import ExperimentConfig, name_dir
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.printable import fold
from arealite.base.trial_files import RunPaths
from arealite.cli.options import run_parser
from arealite.ext.diagnosis.diagnosis import examine
from arealite.ext.diagnosis.explain import explain
from arealite.ext.served_policy.proof_file import proof_notes
from arealite.system.health.vitals import read_roles


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis of a run; return 1 if a process blocks it."""
    description = "Find the process that blocks a run, on any of its hosts."
    paths = RunPaths(run_parser("why", description).parse_args(argv).run)
    launcher = lock_holder(paths.root / ".lock")
    if not paths.config.exists() and not launcher:
        raise UserError(f"no {paths.config}. Name a run folder, like runs/EXPERIMENT/TRIAL.")
    # Without a schema: modules of `imports` may be missing here.
    config = base_config.read(paths.config) if paths.config.exists() else None
    try:
        folder = name_dir(cast(ExperimentConfig, config)) / "vitals" if config else paths.root
    except AttributeError as error:
        raise UserError(
            f"{paths.config} is no config of a run: cluster or a name of the trial is missing. "
            "Name a run folder, like runs/EXPERIMENT/TRIAL."
        ) from error
    if launcher and launcher not in [role.vitals.pid for role in read_roles(folder)]:
        print(f"process {launcher} checks the config of the run; it has started no role yet.")
        return 0
    findings = examine(folder)
    if paths.end.exists():
        print(fold(f"the launcher ended: {paths.end.read_text()}"))
    print(fold(explain(folder, findings, logs=paths.logs)))
    for note in proof_notes(paths.root):
        print(fold(note))
    return 1 if findings else 0


def lock_holder(file: Path) -> int:
    """Return the id of this host's process that has locked `file`; 0 if there is none."""
    with suppress(OSError, ValueError):
        pid = int(file.read_text())
        descriptors = Path(f"/proc/{pid}/fd").iterdir()
        open_files = [os.path.realpath(descriptor) for descriptor in descriptors]
        if os.path.realpath(file) in open_files:
            return pid
    return 0
