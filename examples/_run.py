"""Shared code of the examples: calls `arealite train`, and makes a tiny model if none is given.

An example is a list of options. Options of the command line override them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tools/, and for arealite where it is not installed

from arealite.cli import main  # noqa: E402

ONE_GPU = [
    "trainer.ppo.publisher.type=shared",  # the trainer's process generates, from the same weights
    "trainer.ppo.engine.fsdp.gradient_checkpointing=true",
]
"""For 0.5 to 3 B parameters on one GPU of 80 GB; docs/clusters.md has other layouts."""
KITS = Path("runs/examples/kits").absolute()
Laptop = Callable[[], list[str]]
"""Makes a model and data for a run without model.path; returns options that override the others."""


def train(options: Sequence[str], laptop: Laptop) -> None:
    """Run `arealite train` with the options of example and command line; exit with its code."""
    sys.exit(main.run("arealite.cli.train", complete(options, laptop)))


def complete(options: Sequence[str], laptop: Laptop) -> list[str]:
    """Return all options of the command; later ones override. `--help` prints them and exits."""
    script, *words = sys.argv
    name = Path(script).stem
    if {"-h", "--help"} & {*words}:
        print(sys.modules["__main__"].__doc__, "Its options:\n", *options, sep="\n    ")
        print("\nEvery key, with its default: python3 train.py --help")
        sys.exit()
    own: list[str] = []
    if not any(word.startswith("model.path=") for word in words):
        name, own = f"{name}-laptop", laptop()
    return ["experiment_name=examples", f"trial_name={name}", *options, *own, *words]


def sorting(*, heads: int = 4) -> list[str]:
    """Make the demo's model and data (six digits to sort); return options for a laptop."""
    from arealite.ext.demo.sorting import make_kit

    name = "sorting" if heads == 4 else f"sorting-heads{heads}"
    kit = make_kit(tiny(name, "tools/demo_task.py"), seed=1, heads=heads)
    return [
        f"model.path={kit / 'model'}",
        f"dataset.train={kit / 'train.jsonl'}",
        f"dataset.eval={kit / 'eval.jsonl'}",
        "trainer.ppo.total_steps=60",
        "trainer.ppo.batch_size=512",
        "trainer.ppo.updates=2",
        "trainer.ppo.lr=4e-4",
        "trainer.ppo.optimizer.schedule=linear",
        "trainer.ppo.max_staleness=2",
        "trainer.ppo.collector.sampling.max_new_tokens=8",
        "trainer.ppo.eval.sampling.max_new_tokens=8",
    ]


def lesson(name: str) -> list[str]:
    """Make the model of one of tools/lessons; return options that train the lesson on a laptop."""
    from tools.lesson import make_kit

    found = import_module(f"tools.lessons.{name}").LESSON
    model = make_kit(tiny(name, f"tools/lessons/{name}.py"), found, seed=1)
    return [f"model.path={model}", *found.overrides]


def tiny(name: str, source: str) -> Path:
    """Print that the run uses a tiny model; return the model's folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    print(f"no model.path: a tiny model, taught by {source}, in {KITS / name}", flush=True)
    return KITS / name


def write(name: str, rows: Iterable[dict[str, str]]) -> Path:
    """Write rows to a JSONL file of the tiny model's data; return the file."""
    (KITS / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return KITS / name
