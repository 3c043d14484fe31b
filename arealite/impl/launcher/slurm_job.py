"""The Slurm job of a run: its parts, its sbatch script, and a check of the partitions.

This code runs on a login node; the launcher runs in the job.
"""

import argparse
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE

from arealite.api.config import ExperimentConfig, run_paths
from arealite.base.errors import UserError
from arealite.impl.launcher.processes import counts

PARTS = {"llm_server": "servers", "rollout": "workers", "trainer": "trainers"}
"""The part of the job that runs a role. The datapipe is a child of the supervisor."""
ANSWER_S = 30.0
"""Time limit of a command of Slurm."""


def parts(config: ExperimentConfig) -> dict[str, list[str]]:
    """Return the arguments of sbatch for each part of the job, a heterogeneous component."""
    slurm = config.launcher.slurm
    words = {part: getattr(slurm, part) for role, part in PARTS.items() if counts(config).get(role)}
    own = {part: [*slurm.every, *mine] for part, mine in words.items() if mine}
    return {"head": [*slurm.every, *slurm.head], **own}


def script(config: ExperimentConfig, command: Sequence[str]) -> str:
    """Return the sbatch script of the run.

    Args:
        config: Experiment of the run.
        command: Command line of the supervisor.
    """
    first = [
        f"--job-name={config.experiment_name}-{config.trial_name}",
        f"--output={run_paths(config).logs}/slurm.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:TERM@120",
    ]
    lines = ["#!/bin/bash", f"# {config.experiment_name}/{config.trial_name}, by arealite launch."]
    lines += ["# Submit it again to resume the run. A requeued job resumes by itself."]
    made = parts(config)
    guests = [part for role, part in PARTS.items() if part not in made and counts(config).get(role)]
    for number, (part, words) in enumerate(made.items()):
        lines += ["#SBATCH hetjob", f"# {part}"] if number else [f"# {', '.join([part, *guests])}"]
        own = [*([] if number else first), "--ntasks-per-node=1", *words]
        lines += [f"#SBATCH {word}" for word in own]
    lines += ["", "# On SIGTERM, also 120 s before the time limit: checkpoint, drain, audit, exit."]
    lines += [f"cd {shlex.quote(str(Path.cwd()))} || exit", f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"


def check_partitions(config: ExperimentConfig) -> None:
    """Check that the partitions have enough nodes for all parts of the job.

    Raises:
        UserError: a partition does not exist, is down or is too small.
    """
    command = ["sinfo", "-h", "-o", "%R %a %D %P"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S)
    except (subprocess.SubprocessError, OSError) as error:
        why = getattr(error, "stderr", None) or f"{error}"
        raise UserError(f"Slurm does not respond: {why.strip()}. Is slurmctld up?") from error
    if not (rows := [line.split() for line in done.stdout.splitlines()]):
        what = "this Slurm has no partition (`sinfo` shows none). Its administrator can add one to"
        raise UserError(f"{what} slurm.conf: PartitionName=main Nodes=ALL Default=YES State=UP")
    up = {name: int(nodes) for name, state, nodes, _ in rows if state == "up"}
    default = next((name for name, *_, starred in rows if starred.endswith("*")), None)
    wanted = Counter[str]()
    for part, words in parts(config).items():
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("-p", "--partition", default=default)
        parser.add_argument("-N", "--nodes", default="1")
        parsed, _ = parser.parse_known_args(words)
        known = f"Partitions that are up: {', '.join(up) or 'none'}."
        key = f"launcher.slurm.{part} (or every)"
        if parsed.partition is None:
            raise UserError(f"no default partition: add --partition=NAME to {key}. {known}")
        names = parsed.partition.split(",")
        if missing := [name for name in names if name not in up]:
            raise UserError(f"{key}: no partition {missing[0]} is up. {known}")
        wanted[names[0] if len(names) == 1 else ""] += int(parsed.nodes.partition("-")[0])
    for name, nodes in wanted.items():
        if name and nodes > up[name]:
            what = f"partition {name} has {up[name]} nodes, but the parts of the job need {nodes}"
            fix = "Request fewer nodes, or remove the arguments of a part from launcher.slurm, so"
            raise UserError(f"{what}; parts share no node. {fix} that it shares the head's node.")


def output(
    words: Sequence[str | Path], seconds: float = ANSWER_S, *, stderr: int | None = DEVNULL
) -> str:
    """Run a command of Slurm; return its output of the first `seconds`, for any exit code."""
    try:
        return subprocess.run(
            words, stdout=PIPE, stderr=stderr, text=True, check=False, timeout=seconds
        ).stdout
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode()
