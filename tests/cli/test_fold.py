"""What a terminal shows is broken between words; a pipe gets one row a line."""

from __future__ import annotations

import io
import sys

import pytest

from arealite.cli import info
from arealite.cli import main as cli
from arealite.cli.fold import COMMAND, fold


class Screen(io.StringIO):
    """What says that it is a terminal."""

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
        (  # a sentence's end is none either
            "You lose.  You have another try, and then none.",
            "You lose.  You have another try, and\nthen none.",
        ),
        (
            "no: /a/path/longer/than/what-any-terminal-has",
            "no:\n/a/path/longer/than/what-any-terminal-has",
        ),
    ],
)
def test_lines_are_folded_below_their_last_column(text: str, shown: str) -> None:
    assert fold(text, Screen()) == shown
    assert fold(text, io.StringIO()) == text


@pytest.mark.usefixtures("columns")
def test_a_command_stays_whole_so_that_it_can_be_copied() -> None:
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
def test_no_command_leaves_words_to_the_terminal_to_break(
    words: list[str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(info, "ANSWER_S", 120.0)  # else a program may answer once of twice

    def shown(out: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        try:
            cli.main(words)
        except SystemExit as end:
            assert not end.code  # argparse's, after help
        return out.getvalue()

    piped, folded = shown(io.StringIO()), shown(Screen())
    assert any(len(line) > width for line in piped.splitlines()) or width == 80
    assert not [line for line in folded.splitlines() if len(line) > width and is_prose(line)]
    assert folded.split() == piped.split()


def is_prose(line: str) -> bool:
    return " " in line.strip() and not COMMAND.search(line)
