"""The Slurm job of a run: its parts, its sbatch script, and a check of the partitions.

This code runs on a login node; the launcher runs in the job.
"""

import argparse
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base.errors import UserError
from arealite.ext.clusters.placement import counts

PARTS = {"llm_server": "servers", "rollout": "workers", "trainer": "trainers"}
"""The part of the job that runs a role. The datapipe is a child of the supervisor."""
ANSWER_S = 30.0
"""Time limit of a command of Slurm."""


def parts(config: ExperimentConfig) -> dict[str, list[str]]:
    """Return the arguments of sbatch for each part of the job, a heterogeneous component."""
    slurm = config.launcher.slurm
    arguments = {"head": [*slurm.every, *slurm.head]}
    for role, part in PARTS.items():
        part_arguments: list[str] = getattr(slurm, part)
        if counts(config).get(role) and part_arguments:
            arguments[part] = [*slurm.every, *part_arguments]
    return arguments


def script(config: ExperimentConfig, command: Sequence[str]) -> str:
    """Return the sbatch script of the run.

    Args:
        config: Experiment of the run.
        command: Command line of the supervisor.
    """
    arguments_by_part = parts(config)
    head = arguments_by_part.pop("head")
    # The first part also runs roles that have no part of their own.
    guests = [
        part
        for role, part in PARTS.items()
        if part not in arguments_by_part and counts(config).get(role)
    ]
    options_of_job = [
        f"--job-name={config.experiment_name}-{config.trial_name}",
        f"--output={run_paths(config).logs}/slurm.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@120",
        "--ntasks-per-node=1",
    ]
    lines = [
        "#!/bin/bash",
        f"# {config.experiment_name}/{config.trial_name}, by arealite launch.",
        "# Submit it again to resume the run. A requeued job resumes by itself.",
        f"# {', '.join(['head', *guests])}",
        *_sbatch_lines([*options_of_job, *head]),
    ]
    for part, arguments in arguments_by_part.items():
        lines += ["#SBATCH hetjob", f"# {part}"]
        lines += _sbatch_lines(["--ntasks-per-node=1", *arguments])
    lines += [
        "",
        "# On SIGTERM, also 120 s before the time limit: checkpoint, drain, audit, exit.",
        f"cd {shlex.quote(str(Path.cwd()))} || exit",
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _sbatch_lines(arguments: Sequence[str]) -> list[str]:
    return [f"#SBATCH {argument}" for argument in arguments]


def check_partitions(config: ExperimentConfig) -> None:
    """Check that the partitions have enough nodes for all parts of the job.

    Raises:
        UserError: a partition does not exist, is down or is too small.
    """
    partitions = _read_partitions()
    num_needed = Counter[str]()
    for part, arguments in parts(config).items():
        names, num_nodes = _requested_nodes(part, arguments, partitions)
        if len(names) == 1:  # else Slurm chooses the partition
            num_needed[names[0]] += num_nodes
    num_up = {partition.name: partition.num_nodes for partition in partitions if partition.is_up}
    for name, num_nodes in num_needed.items():
        if num_nodes > num_up[name]:
            raise UserError(
                f"partition {name} has {num_up[name]} nodes, "
                f"but the parts of the job need {num_nodes}; parts share no node. "
                "Request fewer nodes, or remove the arguments of a part from launcher.slurm, "
                "so that it shares the head's node."
            )


@dataclass(frozen=True, kw_only=True)
class _Partition:
    name: str
    num_nodes: int
    is_up: bool
    is_default: bool


def _read_partitions() -> list[_Partition]:
    """Return the partitions that `sinfo` shows.

    Raises:
        UserError: Slurm does not respond, or has no partition.
    """
    command = ["sinfo", "-h", "-o", "%R %a %D %P"]
    try:
        sinfo = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=ANSWER_S,
        )
    except (subprocess.SubprocessError, OSError) as error:
        reason = getattr(error, "stderr", None) or f"{error}"
        raise UserError(f"Slurm does not respond: {reason.strip()}. Is slurmctld up?") from error
    rows = [line.split() for line in sinfo.stdout.splitlines()]
    if not rows:
        raise UserError(
            "this Slurm has no partition (`sinfo` shows none). "
            "Its administrator can add one to slurm.conf: "
            "PartitionName=main Nodes=ALL Default=YES State=UP"
        )
    return [
        _Partition(
            name=name,
            num_nodes=int(num_nodes),
            is_up=state == "up",
            is_default=starred_name.endswith("*"),
        )
        for name, state, num_nodes, starred_name in rows
    ]


def _requested_nodes(
    part: str, arguments: Sequence[str], partitions: Sequence[_Partition]
) -> tuple[list[str], int]:
    """Return the partitions that a part of the job may get, and its least number of nodes.

    Raises:
        UserError: a partition does not exist or is down.
    """
    defaults = [partition.name for partition in partitions if partition.is_default]
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-p", "--partition", default=defaults[0] if defaults else None)
    parser.add_argument("-N", "--nodes", default="1")
    parsed, _ = parser.parse_known_args(arguments)
    up = [partition.name for partition in partitions if partition.is_up]
    up_hint = f"Partitions that are up: {', '.join(dict.fromkeys(up)) or 'none'}."
    key = f"launcher.slurm.{part} (or every)"
    if parsed.partition is None:
        raise UserError(f"no default partition: add --partition=NAME to {key}. {up_hint}")
    names: list[str] = parsed.partition.split(",")
    for name in names:
        if name not in up:
            raise UserError(f"{key}: no partition {name} is up. {up_hint}")
    least_nodes = parsed.nodes.partition("-")[0]
    return names, int(least_nodes)


def output(
    words: Sequence[str | Path], seconds: float = ANSWER_S, *, stderr: int | None = DEVNULL
) -> str:
    """Run a command of Slurm; return its output of the first `seconds`, for any exit code."""
    try:
        return subprocess.run(
            words,
            stdout=PIPE,
            stderr=stderr,
            text=True,
            check=False,
            timeout=seconds,
        ).stdout
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode()
