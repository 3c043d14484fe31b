"""`arealite launch slurm CONFIG`: checks a run, and hands it to a cluster's scheduler.

What then runs on the cluster is `arealite train` with `launcher.type` set accordingly.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from arealite.api.config import ExperimentConfig, run_paths
from arealite.base.errors import UserError
from arealite.cli import configs, options


def main(argv: Sequence[str]) -> int:
    """Prepare the run and submit it, or show with `--print` what would be submitted."""
    where, words = next(iter(argv), ""), [word for word in argv[1:] if word != "--print"]
    if where not in CLUSTERS:
        known = "|".join(CLUSTERS)
        raise UserError(f"usage: arealite launch {known} CONFIG [--print] [key=value …]")
    layers = options.parse(
        words,
        command=f"arealite launch {where}",
        about="Run an experiment on a cluster. --print only shows what would be submitted.",
        schema=ExperimentConfig,
        default=configs.CONFIG_DIR / "async_ppo.yaml",
    )
    config = configs.load(ExperimentConfig, layers.files, layers.overrides)
    own = replace(config.launcher, type=where)
    host = "auto" if config.cluster.host == "127.0.0.1" else config.cluster.host
    config = replace(config, launcher=own, cluster=replace(config.cluster, host=host))
    return CLUSTERS[where](config, "--print" in argv)


def slurm(config: ExperimentConfig, only_show: bool) -> int:
    """Write the script of a Slurm job into the run's folder and submit it."""
    from arealite.cli.train import prepared
    from arealite.impl.launcher.slurm_job import check_partitions, script

    paths = run_paths(config)
    text = script(config, [sys.executable, "-m", "arealite.cli.main", "train", str(paths.config)])
    if only_show:
        print(text, end="")
        return 0
    if not shutil.which("sbatch"):
        raise UserError("no sbatch here. Run this on a login node of the Slurm cluster.")
    check_partitions(config)
    with prepared(config, has_servers=False):
        file = paths.root / "slurm.sbatch"
        file.write_text(text)
    done = subprocess.run(
        ["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"sbatch refused {file}: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    print(f"job {job}; its script: {file}")
    print(f"watch:  squeue -j {job}; tail -F {paths.logs / 'slurm.log'}")
    print(f"cancel: scancel {job}  (checkpoint first; the same command goes on later)")
    return 0


CLUSTERS: dict[str, Callable[[ExperimentConfig, bool], int]] = {"slurm": slurm}
