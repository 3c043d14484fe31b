"""Define a lesson for a small pretrained model, and write its data.

A lesson is a task with a verifiable reward. Its held-out tasks are the same for every seed, and no
task that is trained is among them.
"""

import hashlib
import json
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from arealite.base.errors import InvariantError, UserError
from arealite.base.extras import check_installed, extra_requirement

LessonRow = Mapping[str, Any]
"""A task as docs/data.md describes it: `prompt`, `ground_truth` and other columns."""
LessonMessage = Mapping[str, str]
"""A message with its `role` and `content`."""
LESSONS = "arealite.ext.demo.lessons"
HELD_OUT_SEED = "held-out"
MAX_DRAWS_IN_VAIN = 100_000
MEMORY_OPTIONS = (
    "trainer.ppo.engine.fsdp.max_tokens_per_microbatch=256",
    "trainer.ppo.engine.fsdp.logits_chunk=8388608",
)
"""On a CPU, larger passes save little time and need more memory: 1.7 MB for each token of
SmolLM2-135M."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A task, and the options with which a small pretrained model learns it."""

    about: str
    """What the model learns, in a few words."""
    draw: Callable[[random.Random], LessonRow]
    """A function that draws one task."""
    key: Callable[[LessonRow], Hashable]
    """Tasks with equal keys count as the same task."""
    reward: str
    """The reward function, as MODULE:FUNCTION."""
    max_new_tokens: int
    """Longest answer."""
    options: Sequence[str]
    """Further options of `arealite train` for the reinforcement learning."""
    env: str = "math"
    """Registered name of the environment, which has an option `reward`."""
    max_eval_tokens: int | None = None
    """Longest answer of an evaluation; None: `max_new_tokens`."""
    package: str = ""
    """The package of the extra `envs` that draws the tasks; "": none is needed."""
    demonstrate: Callable[[LessonRow], Sequence[LessonMessage]] | None = None
    """A function that returns the right messages after a prompt, for the warm start; no messages:
    the warm start leaves the task out. None: there is no warm start."""
    warm_start: Sequence[str] = ()
    """Options of `arealite train --config sft` for the warm start."""
    train_rows: int = 4096
    eval_rows: int = 512
    eval_samples: int = 1
    """Samples of each held-out task."""
    shown_parts: Sequence[str] = ()
    """Parts of the reward that the table of measurements shows."""
    demonstrations: int = 0
    """Tasks that are drawn for the warm start."""

    def training_options(self) -> list[str]:
        """Return the options for the reinforcement learning; those of the lesson come last."""
        longest = self.max_eval_tokens or self.max_new_tokens
        env = "trainer.ppo.collector.env"
        return [
            f"{env}.type={self.env}",
            f"{env}.{self.env}.reward.type=function",
            f"{env}.{self.env}.reward.function.paths=[{self.reward}]",
            "trainer.ppo.max_staleness=1",
            "trainer.ppo.loss.eps_high=0.28",
            *MEMORY_OPTIONS,
            f"trainer.ppo.collector.sampling.max_new_tokens={self.max_new_tokens}",
            f"trainer.ppo.eval.sampling.max_new_tokens={longest}",
            *self.options,
        ]


def names_of_lessons() -> list[str]:
    """Return the names of all lessons."""
    names = (entry.name for entry in files(LESSONS).iterdir())
    modules = (name for name in names if name.endswith(".py") and not name.startswith("_"))
    return sorted(name.removesuffix(".py") for name in modules)


def find_lesson(name: str) -> Lesson:
    """Return a lesson.

    Raises:
        UserError: There is no lesson of this name, or a package for it is not installed.
    """
    names = names_of_lessons()
    if name not in names:
        raise UserError(
            f"--lesson {name}: there is no such lesson. Known lessons: {', '.join(names)}."
        )
    lesson: Lesson = import_module(f"{LESSONS}.{name}").LESSON
    if lesson.package:
        check_installed(lesson.package, extra_requirement("envs"), f"--lesson {name}")
    return lesson


def write_data(lesson: Lesson, folder: Path, seed: int) -> dict[str, str]:
    """Write train.jsonl, eval.jsonl and, for a warm start, demonstrations.jsonl.

    Returns:
        {file name: SHA-256 of the file}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = set[Hashable]()
    held_out = list(_draw_new(lesson, HELD_OUT_SEED, lesson.eval_rows, taken))
    # Demonstrations are drawn before the tasks for training, so that no task is in both.
    shown = list(_draw_new(lesson, f"demonstrations-{seed}", lesson.demonstrations, taken))
    trained = list(_draw_new(lesson, f"train-{seed}", lesson.train_rows, taken))
    rows_of_file = {"train.jsonl": trained, "eval.jsonl": held_out}
    if lesson.demonstrate:
        demonstrations = ((row["prompt"], lesson.demonstrate(row)) for row in shown)
        rows_of_file["demonstrations.jsonl"] = [
            {"prompt": prompt, "completion": messages}
            for prompt, messages in demonstrations
            if messages
        ]
    hashes = dict[str, str]()
    for name, rows in rows_of_file.items():
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / name).write_bytes(content)
        hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes


def _draw_new(lesson: Lesson, seed: str, count: int, taken: set[Hashable]) -> Iterator[LessonRow]:
    """Yield `count` tasks whose keys are not in `taken`, and add their keys to it.

    Raises:
        InvariantError: The lesson has fewer different tasks than it wants.
    """
    rng = random.Random(seed)
    draws_in_vain = 0
    while count:
        row = lesson.draw(rng)
        if lesson.key(row) not in taken:
            taken.add(lesson.key(row))
            count -= 1
            draws_in_vain = 0
            yield row
        elif (draws_in_vain := draws_in_vain + 1) == MAX_DRAWS_IN_VAIN:
            raise InvariantError(f"'{lesson.about}' has only {len(taken)} different tasks")


def assistant_message(content: str) -> LessonMessage:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content}
