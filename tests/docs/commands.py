"""The command lines that docstrings and pages of this project show, and a check of each without
running it: files exist, subcommands and targets are there, and a config loads from its words."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.cli import configs, options
from arealite.cli.main import COMMANDS
from arealite.ext.evaluation import collect, evaluate
from arealite.ext.evaluation.collect import CollectConfig
from arealite.ext.hosting import serve
from arealite.ext.hosting.server_config import EnvServerConfig
from arealite.ext.notebook import play_command
from arealite.ext.short_flags.short_flags import translate
from arealite.ext.stages.stages import split
from arealite.ext.tinker.config import TinkerServerConfig

ROOT = Path(__file__).resolve().parents[2]
BEGINS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python3|arealite|make|torchrun|tools/\S+\.sh)\s")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(/[A-Z_]+)*|.*…")
"""A placeholder for the reader's value: M, CONFIG, runs/EXPERIMENT/TRIAL, dataset.train=…"""
SCHEMAS = {
    "train": (ExperimentConfig, "async_ppo.yaml"),
    "check": (ExperimentConfig, "async_ppo.yaml"),
    "launch": (ExperimentConfig, "async_ppo.yaml"),
    "eval": (evaluate.EvaluateConfig, "async_ppo.yaml"),
    "collect": (CollectConfig, "async_ppo.yaml"),
    "serve": (EnvServerConfig, "env_server.yaml"),
    "serve-tinker": (TinkerServerConfig, "async_ppo.yaml"),
    "serve-llm": (ServerConfig, "llm_server.yaml"),
}
"""Commands whose arguments are config overrides, with config class and default file."""
WORDS = {"eval": evaluate.WORDS, "collect": collect.WORDS, "serve": serve.WORDS}
"""Flags of commands that stand for overrides."""
SCRIPTS = {"train.py": "train", "arealite/launch_llm_server.py": "serve-llm"}
ELSEWHERE = {"-m": "a module of another package", "-c": "code", "-": "code on standard input"}


@dataclass(frozen=True)
class Command:
    """A command line, joined from its continuation lines."""

    where: str
    line: str
    text: str
    """The text of the page or docstring, which may define its own files."""


def found(file: Path) -> Iterator[Command]:
    """Yield the command lines of a page, or of a program's docstring."""
    text = file.read_text()
    if file.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif file.suffix == ".sh":
        text = "".join(
            line.removeprefix("#").removeprefix(" ")
            for line in text.splitlines(keepends=True)
            if line.startswith("#")
        )
    joined = text.replace("\\\n", " ")
    fenced = "\n".join(re.findall(r"^```bash\n(.*?)^```", joined, re.DOTALL | re.MULTILINE))
    indented = re.findall(r"^ {4}(\S.*)", joined, re.MULTILINE)
    for line in [*fenced.splitlines(), *indented]:
        if BEGINS.match(f"{line} "):
            yield Command(f"{file.relative_to(ROOT)}: {' '.join(line.split())}", line, text)


def check(command: Command) -> None:
    """Fail the test unless everything that the command names exists."""
    words = shlex.split(command.line, comments=True)
    words = words[: next((i for i, w in enumerate(words) if w in ("&", "|", ">", "2>")), None)]
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    program, *words = words
    if program == "make":
        check_make(words)
    elif program == "torchrun":
        check_config("train", words[words.index("train.py") + 1 :], command)
    elif program == "arealite":
        assert words[0] in COMMANDS, words[0]
        check_config(words[0], words[1:], command)
    elif program == "python3" and words[0] in SCRIPTS:
        check_config(SCRIPTS[words[0]], words[1:], command)
    elif program == "python3" and words[0].startswith("examples/"):
        check_config("train", [*example_options(words[0]), *words[1:]], command)
    elif words[:1] and words[0] not in ELSEWHERE:
        script = program if program != "python3" else words.pop(0)
        if f"`{script}`" not in command.text:  # otherwise the page shows the script
            check_script(script, words)


def check_make(words: list[str]) -> None:
    """Check the targets and variables of a make command."""
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        there = rf"\$\({name}\)" if is_variable else rf"[\s:]{name}[\s:]"
        assert re.search(there, makefile), f"the Makefile has no {word}"


def check_script(script: str, words: list[str]) -> None:
    """Check that a script exists and accepts the options."""
    assert (ROOT / script).is_file(), f"{script} is not there"
    text = (ROOT / script).read_text()
    for word in words:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in text, f"{script} has no {word}"


@cache
def example_options(script: str) -> list[str]:
    """Return the overrides of an example after its parts are registered; [] without options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        loaded = runpy.run_path(str(ROOT / script))
    return loaded.get("OPTIONS", [])


def check_config(name: str, words: list[str], command: Command) -> None:
    """Load the config without placeholders."""
    if name == "play":
        played = play_command.parse(words)
        words = [play_command.full_key(word, played.env) for word in played.words]
        name, words = "train", [f"trainer.ppo.collector.env.type={played.env}", *words]
    if "--machine" in words:
        check_script("arealite/ext/machine/command.py", words)
    if name not in SCHEMAS or "--machine" in words:
        return
    if name == "launch":
        assert words.pop(0) in ("slurm", "ray")
    words, _ = translate(words, WORDS.get(name, ()))
    words = [w for w in words if w not in ("--resume", "--dry-run", "--print", "--help", "--model")]
    own = [w.removeprefix("imports=").strip("[]") for w in words if w.startswith("imports=")]
    kept = [w for w in words if not PLACEHOLDER.fullmatch(w) and not w.startswith("imports=")]
    kept = [w for w in kept if not any(f".{name}." in w or f"={name}" in w for name in own)]
    schema, default = SCHEMAS[name]
    line = options.CommandLine(
        command=name, description="", schema=schema, default=ROOT / "config" / default
    )
    for stage in split(line, kept):
        files = [file if file.is_absolute() else ROOT / file for file in stage.files]
        missing = {file.name for file in files if not file.is_file()}
        told = {name for name in missing if f"`{name}`" in command.text}
        assert missing == told, f"{missing - told} is not there, and the page does not show it"
        overrides = [w for w in stage.overrides if not PLACEHOLDER.fullmatch(w)]
        configs.load(schema, [file for file in files if file.name not in told], overrides)
