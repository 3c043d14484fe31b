"""The shells complete commands and config keys, each from a script that asks nobody."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from arealite.cli import main as cli
from arealite.cli.completion import ROOTS
from arealite.cli.main import COMMANDS

BASH = """
source {script}
COMP_WORDS=({words} '{last}') COMP_CWORD={count}
compopt() {{ echo nospace >&2; }}
_arealite
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{}}
compset() {{}}
_files() {{ print files }}
compadd() {{
  [[ $1 == -S ]] && shift 2
  shift
  local -a fit=(${{(M)@:#'{last}'*}})
  (( $#fit )) && print -l -- $fit
}}
source {script}
words=({words} '{last}') CURRENT={count}+1
_arealite
"""
FISH = "source {script}; complete -C '{words} {last}' | string replace -r '\\t.*' ''"
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

Complete = Callable[[str], Sequence[str]]


@pytest.fixture(params=SHELLS)
def complete(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Complete:
    """Return what one shell completes a line to."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert cli.main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)

    def run(line: str) -> Sequence[str]:
        words, _, last = line.rpartition(" ")
        count = len(words.split())
        code = SHELLS[shell].format(script=script, words=words, last=last, count=count)
        done = subprocess.run([shell, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        shown = done.stderr.replace("nospace\n", "")
        assert not shown, shown
        return done.stdout.split()

    return run


def test_commands(complete: Complete) -> None:
    assert set(complete("arealite ")) >= set(COMMANDS)
    assert complete("arealite tr") == ["train"]


def test_keys_of_the_commands_config(complete: Complete) -> None:
    assert complete("arealite train trainer.ppo.max_st") == ["trainer.ppo.max_staleness="]
    assert complete("arealite check a=1 cluster.name_s") == ["cluster.name_store="]
    assert complete("arealite serve-llm llm_server.sglang.pyt") == ["llm_server.sglang.python="]
    assert "trainer.ppo.max_staleness=" not in complete("arealite serve-llm trainer.ppo.max_st")


def test_options(complete: Complete) -> None:
    assert complete("arealite train --dr") == ["--dry-run"]
    assert complete("arealite launch sl") == ["slurm"]
    assert complete("arealite completion f") == ["fish"]


def test_every_command_with_overrides_is_known() -> None:
    assert {name for names in ROOTS.values() for name in names} < COMMANDS.keys()
