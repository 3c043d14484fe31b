"""Train an agent: datapipe, rollout workers and trainer ranks on this machine.
--resume is resume=must; --dry-run checks everything and starts nothing."""

import os
import shutil
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.api.hooks import TrainerRank
from arealite.api.launcher import launchers
from arealite.base import entries, outputs
from arealite.base.errors import UserError
from arealite.base.files import lock_file
from arealite.cli import configs
from arealite.impl.launcher.processes import starters
from arealite.system.health import vitals

FLAGS = ("--resume", "--dry-run")


def main(argv: Sequence[str]) -> int:
    """Check the experiment, then run its stages one after the other.

    If RANK is set, as by torchrun and a PyTorchJob, run one trainer rank instead of a launcher.
    """
    starters().begin()  # before a module of the user is imported
    words = [word for word in argv if word not in FLAGS]
    if "--resume" in argv:
        if any(word.startswith("--then") for word in words):
            raise UserError("--resume is for one stage. Stages resume without it: remove it.")
        words.append("resume=must")
    command = "train.py" if sys.argv[0].endswith("train.py") else "arealite train"
    stages = configs.parse_stages(words, command=command, description=str(__doc__))
    if "--dry-run" in argv:
        return dry_run(stages)
    outputs.protect()
    if "RANK" in os.environ:
        if len(stages) > 1:
            raise UserError("a trainer rank runs one stage: use one command per stage, not --then.")
        return run_rank(stages[0])

    from arealite.cli.preflight import check_options

    for config in stages:
        check_options(config)
    for number, config in enumerate(stages, start=1):
        if len(stages) > 1:
            root = run_paths(config).root
            print(
                f"stage {number} of {len(stages)}: {config.trainer.type}, {root}",
                flush=True,
            )
        if code := run(config):
            return code
    return 0


def dry_run(stages: Sequence[ExperimentConfig]) -> int:
    """Check the experiment without starting it; return 0."""
    from arealite.cli.preflight import check_options, check_tensors, preflight

    for config in stages:
        check_options(config)
    preflight(stages[0])
    check_tensors(stages[0])
    print("all checks passed; nothing was started")
    return 0


def run(config: ExperimentConfig) -> int:
    """Run one experiment to its end; return its exit code."""
    with starters().early(config), prepared(config) as config:
        vitals.start("launcher-0", name_dir(config) / "vitals")
        return launchers.get(config.launcher.type)(config).run()


def run_rank(config: ExperimentConfig) -> int:
    """Run the trainer rank that the environment names; return the exit code.

    Raises:
        UserError: No extension runs ranks that another program starts.
    """
    runners: list[TrainerRank] = entries.hooks("trainer_rank")
    if not runners:
        raise UserError(
            "RANK is set, but no installed package runs a single rank. For a run here, unset RANK."
        )
    return runners[-1](config)


@contextmanager
def prepared(config: ExperimentConfig, *, has_servers: bool = True) -> Generator[ExperimentConfig]:
    """Check an experiment, lock its folder and prepare it for `resume`; yield the run's config."""
    from arealite.cli import resume
    from arealite.cli.preflight import preflight

    paths = run_paths(config)
    names = name_dir(config)
    lock_fix = "Stop it, or choose another trial_name."
    root_lock = paths.root / ".lock"
    new_folders = [path for path in (paths.root, *paths.root.parents) if not path.exists()]
    with ExitStack() as stack:
        with suppress(OSError):  # the check reports it
            paths.root.mkdir(parents=True, exist_ok=True)
            # `arealite why` finds the launcher by this lock until the config is checked.
            stack.enter_context(lock_file(root_lock, fix=lock_fix))
        try:
            preflight(config, has_servers=has_servers)
        except BaseException:
            if new_folders:
                shutil.rmtree(paths.root, ignore_errors=True)
            with suppress(OSError):  # another trial uses the folder
                for folder in new_folders[1:]:
                    folder.rmdir()
            raise
    for folder in (names, paths.root):
        folder.mkdir(parents=True, exist_ok=True)
    # A run in another folder would use the same names.
    with lock_file(names / ".lock", fix=lock_fix):
        with lock_file(root_lock, fix=lock_fix):
            resume.move_old_run(config)
        paths.logs.mkdir(parents=True, exist_ok=True)
        outputs.log_to(paths.logs / "launcher-0.log")
        with lock_file(root_lock, fix=lock_fix):  # move_old_run may have renamed the folder
            yield resume.prepare_folder(config)
