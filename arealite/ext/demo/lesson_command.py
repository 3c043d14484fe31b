"""Teach a small pretrained model a lesson, and measure it before and after.

Each step is a command that a user could call: `arealite train` and `arealite eval`.
"""

import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arealite.base.errors import UserError
from arealite.base.files import lock_file, replacing
from arealite.cli import train
from arealite.ext.audit import command as audit
from arealite.ext.demo.lesson import Lesson, write_data
from arealite.ext.demo.real_models import SOURCES, add_chat_template, fetch
from arealite.ext.evaluation import evaluate
from arealite.ext.gguf import gguf_file
from arealite.ext.gguf.gguf_file import sha256_of
from arealite.ext.view import report_command

NEXT_STEPS = """\

look at it:
  {folder}/training/report.html: curves, texts and tokens
  {folder}/result.json: what was measured, and hashes of model and tasks
the trained model: {export}"""
"""Printed after a lesson."""

SET_BY_LESSON = (
    "experiment_name",
    "trial_name",
    "seed",
    "model.path",
    "dataset.train",
    "dataset.eval",
    "cluster.run_root",
    "launcher.llm_servers",
    "launcher.server_args",
    "trainer.ppo.publisher.type",
    "trainer.ppo.checkpoint.export",
)
"""Options that a lesson sets itself, or whose defaults it needs."""
MODEL_NAMES = {
    "pretrained": "pretrained model",
    "warm start": "model after the warm start",
    "training": "trained model",
}


class LessonRun:
    """One lesson with one seed: its folder, the options of its commands, and what was measured."""

    def __init__(
        self, name: str, lesson: Lesson, *, model: Path, seed: int, words: Sequence[str]
    ) -> None:
        """Prepare the run of a lesson.

        Args:
            name: Name of the lesson, for the folder of the run.
            lesson: The lesson.
            model: Model folder.
            seed: Seed of tasks, demonstrations and training.
            words: Further options of `arealite train` for the reinforcement learning.
        """
        self.lesson = lesson
        self.model = model
        self.words = list(words)
        self.seed = seed
        self.experiment = f"{name}-seed{seed}"
        self.folder = Path("runs") / self.experiment
        self.result: dict[str, Any] = {
            "lesson": name,
            "seed": seed,
            "commands": {},
            "seconds": {},
            "measured": {},
        }

    def run(self) -> int:
        """Run all steps; return the exit code of the command that failed, or 0.

        Raises:
            UserError: Another process runs the same lesson with the same seed.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = self.folder.with_name(f".{self.folder.name}.lock")
        with lock_file(lock, fix="Wait until it has ended, or choose another --seed."):
            try:
                return self._run()
            except KeyboardInterrupt:
                done = self.folder / "result.json"
                print(f"stopped. The same command begins again; {done} has the commands so far")
                raise

    def _run(self) -> int:
        self._move_old_folder()
        self.result["data"] = write_data(self.lesson, self.folder / "data", self.seed)
        print(f"tasks: {self.folder / 'data'}: {self.lesson.about}")
        self.result["model"] = {
            "folder": str(self.model),
            "weights_sha256": sha256_of(self.model / "model.safetensors"),
        }
        if code := self._measure("pretrained", self.model):
            return code
        start = self.model
        if self.lesson.demonstrate:
            if code := self._command("warm start", train.main, self._warm_start()):
                return code
            start = self._export_of("warm_start")
            if code := self._measure("warm start", start):
                return code
        if code := self._command("training", train.main, self._training(start)):
            return code
        if code := self._measure("training", self._export_of("training")):
            return code
        run_folder = str(self.folder / "training")
        report_command.main([run_folder])
        code = audit.main([run_folder])
        self.result["audit"] = "balanced" if code == 0 else "failed"
        self._save()
        print(self.table())
        print(NEXT_STEPS.format(folder=self.folder, export=self._export_of("training")))
        return code

    def table(self) -> str:
        """Return the measurements as text."""
        title = f"{self.lesson.eval_rows} held-out tasks"
        lines = [f"{title:<24}{'reward (95 %)':<26}right answers (95 %)"]
        for name, measured in self.result["measured"].items():
            reward = _interval(measured["reward"])
            lines.append(f"{name:<24}{reward:<26}{_interval(measured['pass@1'])}")
            for part in self.lesson.shown_parts:
                lines.append(f"  {part:<22}{measured['parts'][part]:.3f}")
        return "\n".join(lines)

    def _move_old_folder(self) -> None:
        """Rename the folder of an earlier run, as `resume=never` does."""
        if self.folder.exists():
            old = self.folder.with_name(f"{self.folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
            self.folder.rename(old)
            print(f"the earlier run is in {old} now")

    def _export_of(self, trial: str) -> Path:
        return (self.folder / trial / "export").absolute()

    def _common(self, trial: str, model: Path) -> list[str]:
        return [
            f"experiment_name={self.experiment}",
            f"trial_name={trial}",
            f"seed={self.seed}",
            f"model.path={json.dumps(str(model))}",
        ]

    def _warm_start(self) -> list[str]:
        data = self.folder / "data" / "demonstrations.jsonl"
        words = ["--config", "sft", *self._common("warm_start", self.model)]
        words += [f"dataset.train={data}", f"launcher.trainer_threads={_cores()}"]
        return [*words, *self.lesson.warm_start]

    def _tasks(self) -> list[str]:
        """Return the options that training and evaluation share."""
        return [
            "launcher.llm_servers=1",
            *self.lesson.training_options(),
            *self.words,
        ]

    def _training(self, start: Path) -> list[str]:
        data = self.folder / "data" / "train.jsonl"
        words = ["--config", "async_ppo", *self._common("training", start)]
        return [*words, f"dataset.train={data}", *self._tasks()]

    def _measure(self, name: str, model: Path) -> int:
        """Evaluate a model on the held-out tasks; return the exit code."""
        file = self.folder / f"{name.replace(' ', '_')}.json"
        threads = f"launcher.server_args=[llm_server.embedded.num_threads={_cores()}]"
        words = [*self._common("evaluation", model), *self._tasks(), threads]
        words += [f"dataset.eval={self.folder / 'data' / 'eval.jsonl'}", f"name={file.stem}"]
        words += [f"out={file}", f"n={self.lesson.eval_samples}", "k=[1]"]
        if code := self._command(f"evaluation of the {MODEL_NAMES[name]}", evaluate.main, words):
            return code
        (row,) = json.loads(file.read_text())["results"]
        measured = {"reward": row["reward"], "pass@1": row["pass"]["1"], "parts": row["parts"]}
        self.result["measured"][name] = measured
        self._save()
        return 0

    def _command(self, step: str, main: Any, words: list[str]) -> int:
        """Call a command of arealite; note the command and its seconds."""
        command = "eval" if main is evaluate.main else "train"
        self.result["commands"][step] = f"arealite {command} {shlex.join(words)}"
        self._save()
        print(f"\n{step}", flush=True)
        begin = time.monotonic()
        code: int = main(words)
        seconds = round(time.monotonic() - begin, 1)
        self.result["seconds"][step] = seconds
        self._save()
        ended = f"failed with code {code}" if code else "done"
        print(f"{step}: {ended} after {seconds:.0f} s", flush=True)
        return code

    def _save(self) -> None:
        with replacing(self.folder / "result.json") as temporary:
            temporary.write_text(json.dumps(self.result, indent=1) + "\n")


def model_folder(name: str, *, gguf: Path | None, accepts_license: bool) -> Path:
    """Return the folder of a small pretrained model, which is downloaded if needed.

    Args:
        name: A name of SOURCES.
        gguf: The GGUF file to use instead of a download.
        accepts_license: Whether the user accepts the terms of the model.

    Raises:
        UserError: The terms must be accepted, a package is not installed, or the model cannot be
            downloaded or read.
    """
    source = SOURCES[name]
    if source.must_be_accepted and not accepts_license:
        terms = f"{source.file_name} has terms of use: {source.license}"
        raise UserError(f"{terms}. If you accept them, add --accept-license.")
    gguf_file.check_packages(f"--model {name}")
    if gguf is None:
        print(f"model: {source.file_name}, {source.license}", flush=True)
        gguf = fetch(name, gguf_file.cache_folder() / "packages")
    folder, conversion = gguf_file.model_folder(str(gguf))
    if conversion:
        print(conversion)
    if source.chat_template is None:
        return folder
    with_template = gguf_file.cache_folder() / "chat" / folder.name
    add_chat_template(folder, source.chat_template, with_template)
    print(
        f"model: {source.file_name} has no chat template; {with_template} has one "
        "(plain text, `Answer:` before an answer) and links to its files"
    )
    return with_template


def check_words(words: Sequence[str]) -> None:
    """Refuse options that a lesson sets itself.

    Raises:
        UserError: There is such an option.
    """
    for word in words:
        key = word.partition("=")[0]
        if key in SET_BY_LESSON:
            raise UserError(
                f"{key} is set by the lesson: "
                "remove it, or use the commands in the result.json of a lesson."
            )


def _interval(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.3f} ({estimate['low']:.3f} … {estimate['high']:.3f})"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
