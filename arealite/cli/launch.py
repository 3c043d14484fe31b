"""`arealite launch slurm|ray CONFIG`: check a run and start it on a cluster.

The cluster then runs `arealite train` with this `launcher.type`.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from arealite.api.config import ExperimentConfig, run_paths
from arealite.base import outputs
from arealite.base.errors import UserError
from arealite.cli import configs
from arealite.cli.fold import fold
from arealite.cli.texts import TEXTS


def main(argv: Sequence[str]) -> int:
    """Check the run and submit it; with `--print`, print the job instead."""
    if "-h" in argv[:1] or "--help" in argv[:1]:
        print(fold(USAGE))
        return 0
    where = next(iter(argv), "")
    words = [word for word in argv[1:] if word != "--print"]
    if where not in CLUSTERS:
        raise UserError(USAGE)
    description = "Run an experiment on a cluster. --print only prints the job."
    command = f"arealite launch {where}"
    config = configs.parse(ExperimentConfig, words, command=command, description=description)
    own = replace(config.launcher, type=where)
    host = "auto" if config.cluster.host == "127.0.0.1" else config.cluster.host
    config = replace(config, launcher=own, cluster=replace(config.cluster, host=host))
    only_show = "--print" in argv
    if not only_show:
        outputs.protect()
    return CLUSTERS[where](config, only_show)


def slurm(config: ExperimentConfig, only_show: bool) -> int:
    """Write the script of a Slurm job to the run's folder and submit it."""
    from arealite.cli.train import prepared
    from arealite.impl.launcher.slurm_job import check_partitions, script

    paths = run_paths(config)
    text = script(config, [sys.executable, "-m", "arealite.cli.main", "train", str(paths.config)])
    if only_show:
        print(text, end="")
        return 0
    if not shutil.which("sbatch"):
        raise UserError("sbatch is not installed. Run this on a login node of a Slurm cluster.")
    check_partitions(config)
    sbatch(["--test-only"], text)
    with prepared(config, has_servers=False):
        file = paths.root / "slurm.sbatch"
        file.write_text(text)
    job = sbatch(["--parsable", str(file)]).strip().partition(";")[0]
    print(TEXTS["slurm"].format(job=job, file=file, log=paths.logs / "slurm.log"))
    return 0


def ray(config: ExperimentConfig, only_show: bool) -> int:
    """Run the supervisor here and the other roles in a placement group of a Ray cluster."""
    from arealite.cli.train import run
    from arealite.impl.launcher.ray import bundles

    if only_show:
        for name, bundle in bundles(config).items():
            print(name, *(f"{kind}={count:g}" for kind, count in bundle.items()))
        return 0
    return run(config)


def sbatch(words: Sequence[str], text: str = "") -> str:
    """Run sbatch and return its output.

    Raises:
        UserError: sbatch failed; the message has its stderr.
    """
    done = subprocess.run(["sbatch", *words], input=text, capture_output=True, text=True)
    if done.returncode:
        what = f"sbatch refused the job: {done.stderr.strip()}"
        raise UserError(f"{what}. Print the job with --print, and change launcher.slurm.*")
    return done.stdout


CLUSTERS: dict[str, Callable[[ExperimentConfig, bool], int]] = {"slurm": slurm, "ray": ray}
USAGE = f"usage: arealite launch {'|'.join(CLUSTERS)} CONFIG [--print] [key=value …]"
