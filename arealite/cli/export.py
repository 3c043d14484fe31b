"""`arealite export RUN`: a checkpoint of a run as a Hugging Face folder, without training.

One process, whatever number of ranks wrote it: shards are read back at any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from arealite.api.config import ExperimentConfig
from arealite.api.engine import Head, Training
from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.cli import configs
from arealite.cli.options import run_parser
from arealite.cli.resume import step_of
from arealite.impl.engine import checkpoint


def main(argv: Sequence[str]) -> int:
    """Write the model of one checkpoint; print where."""
    parser = run_parser("export", "Write a run's checkpoint as a Hugging Face folder.")
    parser.add_argument("--step", type=int, help="of the checkpoint; without it, the newest")
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
    """Return a run's good checkpoint of `step`, of None the newest.

    Raises:
        UserError: there is none; names those there are.
    """
    good = {step_of(path.name): path for path in checkpoint.list_good(paths.checkpoints)}
    wanted = max(good, default=None) if step is None else step
    if wanted not in good:
        what = "no good checkpoint" if step is None else f"no good checkpoint of step {step}"
        listed = ", ".join(map(str, good)) or "none"
        raise UserError(f"{what} in {paths.checkpoints}. Steps that have one: {listed}.")
    return good[wanted]


def write(config_file: Path, source: Path, out: Path) -> None:
    """Load a checkpoint into the run's own engine, and export it."""
    whole = [f"trainer.{part}.engine.fsdp.shard_size=0" for part in ("ppo", "offline")]
    config = configs.load(ExperimentConfig, config_file, whole, is_saved=True)
    from arealite.api.trainer import trainers
    from arealite.impl.trainer.components import make_engine
    from arealite.impl.trainer.world import World

    options = config.trainer.offline if config.trainer.is_offline else config.trainer.ppo
    world = World.init(threads=config.launcher.trainer_threads, seed=config.seed)
    try:
        head: Head = getattr(trainers.get(config.trainer.type), "head", "lm")
        training = Training(options.optimizer, options.lr, 1)  # its state is in the checkpoint
        engine = make_engine(config, training=training, head=head)
        engine.load(source)
        engine.export(out)
    finally:
        world.destroy()
