"""Output wraps between words on a terminal; a pipe gets one line per row."""

from __future__ import annotations

import io
import sys

import pytest

from arealite.base.printable import COMMAND, fold
from arealite.cli import main as cli
from arealite.ext.machine import info


class Screen(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("short\n  lines   stay", "short\n  lines   stay"),
        (
            "memory     server: all requests at full context",
            "memory     server: all requests at full\n           context",
        ),
        (
            "      one of the keys of a config, told indented",
            "      one of the keys of a config, told\n      indented",
        ),
        (  # no room below the last column
            "math       agent      a file's        Scores against the truth.",
            "math       agent      a file's\n    Scores against the truth.",
        ),
        (  # no room below the end of a sentence either
            "You lose.  You have another try, and then none.",
            "You lose.  You have another try, and\nthen none.",
        ),
        (
            "no: /a/path/longer/than/what-any-terminal-has",
            "no:\n/a/path/longer/than/what-any-terminal-has",
        ),
    ],
)
def test_long_lines_wrap_below_their_last_column(text: str, shown: str) -> None:
    assert fold(text, Screen()) == shown
    assert fold(text, io.StringIO()) == text


@pytest.mark.usefixtures("columns")
def test_commands_are_not_wrapped() -> None:
    text = "servers    none; start: arealite serve-llm trial_name=t model.path=/models/m"
    assert fold(text, Screen()) == text


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["envs"],
        ["info"],
        ["play", "--help"],
        ["train", "--help"],
        ["launch", "--help"],
        ["audit", "/no/such/folder/of/a/run/that/has/some/long/name"],
    ],
    ids=" ".join,
)
def test_output_of_each_command_fits_the_terminal(
    words: list[str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(
        info, "ANSWER_S", 120.0
    )  # otherwise a program may answer only one of two times

    def shown(out: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        try:
            cli.main(words)
        except SystemExit as end:
            assert not end.code  # argparse exits after help
        return out.getvalue()

    piped, folded = shown(io.StringIO()), shown(Screen())
    assert any(len(line) > width for line in piped.splitlines()) or width == 80
    assert not [line for line in folded.splitlines() if len(line) > width and is_prose(line)]
    assert folded.split() == piped.split()


def is_prose(line: str) -> bool:
    return " " in line.strip() and not COMMAND.search(line)
