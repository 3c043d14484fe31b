"""`arealite train` and train.py: a launcher, or one trainer rank where RANK is set (torchrun)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from arealite.api.config import ExperimentConfig, name_dir, run_paths
from arealite.api.launcher import launchers
from arealite.base.errors import UserError
from arealite.cli import configs
from arealite.system.health import vitals
from arealite.system.locks import lock_file

FLAGS = ("--resume", "--dry-run")


def main(argv: Sequence[str]) -> int:
    """Check the experiment, then run it to its end; its stages one after the other."""
    words = [word for word in argv if word not in FLAGS]
    if "--resume" in argv:
        if any(word.startswith("--then") for word in words):
            raise UserError("--resume is for one stage. Stages go on by themselves: leave it out.")
        words.append("resume=must")
    stages = configs.parse_stages(
        words,
        command="train.py",
        description="Train an agent: datapipe, rollout workers and trainer ranks on this machine.\n"
        "--resume is resume=must; --dry-run checks everything and starts nothing.",
    )
    if "RANK" in os.environ and "--dry-run" not in argv:
        if len(stages) > 1:
            raise UserError("a trainer rank runs one stage: without --then, a command for each.")
        return run_rank(stages[0], int(os.environ["RANK"]))

    from arealite.cli.preflight import check_options, preflight

    for config in stages:
        check_options(config)
    if "--dry-run" in argv:
        preflight(stages[0])
        print("all checks passed; nothing was started")
        return 0
    for number, config in enumerate(stages, start=1):
        if len(stages) > 1:
            what = f"{config.trainer.type}, {run_paths(config).root}"
            print(f"stage {number} of {len(stages)}: {what}", flush=True)
        if code := run(config):
            return code
    return 0


def run(config: ExperimentConfig) -> int:
    """Run one experiment to its end; return its exit code."""
    with prepared(config) as config:
        vitals.start("launcher-0", name_dir(config) / "vitals")
        return launchers.get(config.launcher.type)(config).run()


def run_rank(config: ExperimentConfig, rank: int) -> int:
    """Train as one rank. Of torchrun's ranks, the first brings up the run's other roles."""
    from arealite.cli import role
    from arealite.cli.preflight import check_options

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return role.run("trainer", rank, config)
    ranks = int(os.environ["WORLD_SIZE"])
    config = replace(config, launcher=replace(config.launcher, trainer_ranks=ranks))
    check_options(config)
    if rank:  # by the time the ranks meet, the first has settled what `resume` wants
        return role.run("trainer", rank, replace(config, resume="auto"))
    from arealite.impl.launcher.torchrun import sidecar

    with prepared(config) as config, sidecar(config):
        return role.run("trainer", rank, config)


@contextmanager
def prepared(config: ExperimentConfig, *, has_servers: bool = True) -> Generator[ExperimentConfig]:
    """Check an experiment, and hold its folder as `resume` wants it; yield its config from then
    on."""
    from arealite.cli import resume
    from arealite.cli.preflight import preflight

    paths, fix = run_paths(config), "Stop it, or choose another trial_name."
    names = name_dir(config)
    new = [folder for folder in (paths.root, *paths.root.parents) if not folder.exists()]
    with ExitStack() as stack:
        with suppress(OSError):  # the check reports it
            paths.root.mkdir(parents=True, exist_ok=True)
            # `arealite why` finds the launcher by this lock until the config is checked.
            stack.enter_context(lock_file(paths.root / ".lock", fix=fix))
        try:
            preflight(config, has_servers=has_servers)
        except BaseException:
            if new:
                shutil.rmtree(paths.root, ignore_errors=True)
            with suppress(OSError):  # another trial has begun in it
                for folder in new[1:]:
                    folder.rmdir()
            raise
    for folder in (names, paths.root):
        folder.mkdir(parents=True, exist_ok=True)
    with lock_file(names / ".lock", fix=fix):  # a run in another folder would find our roles
        with lock_file(paths.root / ".lock", fix=fix):
            resume.begin_anew(config)
        paths.logs.mkdir(parents=True, exist_ok=True)
        with lock_file(paths.root / ".lock", fix=fix):  # the folder may be another one than before
            yield resume.settle(config)
