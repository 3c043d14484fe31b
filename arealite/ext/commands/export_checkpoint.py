"""`arealite export RUN`: write a checkpoint of a run as a Hugging Face folder.

One process reads the shards of any number of ranks.
"""

from collections.abc import Sequence
from pathlib import Path

from arealite.api.engine import Training
from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths, step_of
from arealite.cli import configs
from arealite.cli.options import run_parser
from arealite.impl.engine import checkpoint


def main(argv: Sequence[str]) -> int:
    """Write the model of one checkpoint; print the folder."""
    parser = run_parser("export", "Write a run's checkpoint as a Hugging Face folder.")
    parser.add_argument("--step", type=step_of, help="step of the checkpoint; default: the newest")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/export-step-…")
    options = parser.parse_args(argv)
    paths = RunPaths(options.run.absolute())
    source = find(paths, options.step)
    out: Path = (options.out or paths.root / f"export-{source.name}").absolute()
    if out.exists():
        raise UserError(f"{out} exists. Remove it, or name another folder with --out.")
    write(paths.config, source, out)
    print(out)
    return 0


def find(paths: RunPaths, step: int | None) -> Path:
    """Return a run's valid checkpoint of `step`; None: the newest.

    Raises:
        UserError: There is none. The message lists the steps of the valid checkpoints.
    """
    good = {step_of(path.name): path for path in checkpoint.list_good(paths.checkpoints)}
    selected_step = max(good, default=None) if step is None else step
    if selected_step not in good:
        of_step = "" if step is None else f" of step {step}"
        good_steps = ", ".join(map(str, good)) or "none"
        raise UserError(
            f"no valid checkpoint{of_step} in {paths.checkpoints}. Steps with one: {good_steps}."
        )
    return good[selected_step]


def write(config_file: Path, source: Path, out: Path) -> None:
    """Load a checkpoint into the run's engine, and export the model."""
    whole_model = [
        "trainer.ppo.engine.fsdp.shard_size=0",
        "trainer.offline.engine.fsdp.shard_size=0",
    ]
    config = configs.load(ExperimentConfig, config_file, whole_model, is_saved=True)
    from arealite.api.trainer import trainers
    from arealite.impl.trainer.base import make_engine
    from arealite.impl.trainer.rank_group import World

    options = config.trainer.selected_options
    head = trainers.get(config.trainer.type).head
    world = World.init(threads=config.launcher.trainer_threads, seed=config.seed, is_alone=True)
    try:
        training = Training(
            optimizer=options.optimizer, lr=options.lr, total_updates=1
        )  # the checkpoint has its state
        engine = make_engine(config, training=training, head=head)
        engine.load(source)
        engine.export(out)
    finally:
        world.destroy()
