"""`arealite launch slurm|ray CONFIG`: check a run and start it on a cluster.

The cluster then runs `arealite train` with this `launcher.type`.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base import outputs
from arealite.base.errors import UserError
from arealite.base.printable import fold
from arealite.cli import configs

SUBMITTED = """\
job {job}; its script: {file}
watch:  squeue -j {job}; tail -F {log}
cancel: scancel --batch --signal=TERM {job}  (writes a checkpoint, then exits; the
        same launch command resumes. Without --signal, Slurm kills it after KillWait.)"""
"""Printed after a job was submitted."""


def main(argv: Sequence[str]) -> int:
    """Check the run and submit it; with `--print`, print the job instead."""
    if "-h" in argv[:1] or "--help" in argv[:1]:
        print(fold(USAGE))
        return 0
    cluster_type = next(iter(argv), "")
    words = [word for word in argv[1:] if word != "--print"]
    if cluster_type not in CLUSTERS:
        raise UserError(USAGE)
    config = configs.parse(
        ExperimentConfig,
        words,
        command=f"arealite launch {cluster_type}",
        description="Run an experiment on a cluster. --print only prints the job.",
    )
    config = replace(config, launcher=replace(config.launcher, type=cluster_type))
    if config.cluster.host == "127.0.0.1":
        config = replace(config, cluster=replace(config.cluster, host="auto"))
    only_show = "--print" in argv
    if not only_show:
        outputs.protect()
    return CLUSTERS[cluster_type](config, only_show)


def slurm(config: ExperimentConfig, only_show: bool) -> int:
    """Write the script of a Slurm job to the run's folder and submit it."""
    from arealite.cli.train import prepared
    from arealite.ext.clusters.slurm_job import check_partitions, script

    paths = run_paths(config)
    command = [sys.executable, "-m", "arealite.cli.main", "train", str(paths.config)]
    job_script = script(config, command)
    if only_show:
        print(job_script, end="")
        return 0
    if not shutil.which("sbatch"):
        raise UserError("sbatch is not installed. Run this on a login node of a Slurm cluster.")
    check_partitions(config)
    sbatch(["--test-only"], job_script)
    with prepared(config, has_servers=False):
        file = paths.root / "slurm.sbatch"
        file.write_text(job_script)
    job, _, _ = sbatch(["--parsable", str(file)]).strip().partition(";")
    print(SUBMITTED.format(job=job, file=file, log=paths.logs / "slurm.log"))
    return 0


def ray(config: ExperimentConfig, only_show: bool) -> int:
    """Run the supervisor here and the other roles in a placement group of a Ray cluster."""
    from arealite.cli.train import run
    from arealite.ext.clusters.ray import bundles

    if only_show:
        for name, bundle in bundles(config).items():
            resources = [f"{kind}={count:g}" for kind, count in bundle.items()]
            print(name, *resources)
        return 0
    return run(config)


def sbatch(words: Sequence[str], job_script: str = "") -> str:
    """Run sbatch and return its output.

    Raises:
        UserError: sbatch failed; the message has its stderr.
    """
    process = subprocess.run(
        ["sbatch", *words],
        input=job_script,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise UserError(
            f"sbatch refused the job: {process.stderr.strip()}. "
            "Print the job with --print, and change launcher.slurm.*"
        )
    return process.stdout


CLUSTERS: dict[str, Callable[[ExperimentConfig, bool], int]] = {"slurm": slurm, "ray": ray}
USAGE = f"usage: arealite launch {'|'.join(CLUSTERS)} CONFIG [--print] [key=value …]"
