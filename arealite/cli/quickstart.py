"""Make a tiny model and its task, sorting six digits. Then train the model with
server, workers and trainer on this machine: three minutes on two cores.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from arealite.api.config import run_paths
from arealite.base import outputs
from arealite.cli import configs, train
from arealite.cli.texts import TEXTS
from arealite.impl.demo.sorting import make_kit


def main(argv: Sequence[str]) -> int:
    """Make model and data and train; return the exit code of the training."""
    parser = argparse.ArgumentParser(prog="arealite quickstart", description=str(__doc__))
    parser.add_argument("--seed", type=int, default=1, help="seed of model, data and training")
    parser.add_argument("--kit", type=Path, help="only write model and data to this folder")
    parser.add_argument("words", nargs="*", metavar="key=value", help="options of arealite train")
    options = parser.parse_intermixed_args(argv)
    if not options.kit:
        outputs.protect()
    kit = options.kit or Path(f"runs/demo/kit-seed{options.seed}")
    print(f"model and data: {kit}; the model is taught until 30 % of its answers are right")
    make_kit(kit, options.seed)
    if options.kit:
        return 0
    words = ["--config", "demo", f"model.path={kit / 'model'}", f"seed={options.seed}"]
    words += [f"dataset.{part}={kit / part}.jsonl" for part in ("train", "eval")]
    words += ["trial_name=quickstart", "resume=never", "launcher.llm_servers=1", *options.words]
    print(f"training: arealite train {' '.join(words)}", flush=True)
    if code := train.main(words):
        return code
    paths = run_paths(configs.parse_stages(words, command=parser.prog, description="")[0])
    print(TEXTS["quickstart"].format(run=paths.root, kit=kit, export=paths.export))
    return 0
