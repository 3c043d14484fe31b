"""Control characters are escaped in all printed output."""

from __future__ import annotations

import io
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.base.printable import guard_output, printable, unguarded
from tests.hostile import CONTROLS, SHOWN, controls_in


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\rb\x00\x7f", r"a\rb\x00\x7f"),
        ("\x9b31m\x85", r"\x9b31m\x85"),
        ("\u2028\u2029\u202e\u2066", r"\u2028\u2029\u202e\u2066"),
        ("\ud83d \udcff", r"\ud83d \udcff"),
        ("tab\tand\nnewline, η, 中文, 😀, e\u0301", "tab\tand\nnewline, η, 中文, 😀, e\u0301"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


@given(st.text(st.characters(codec=None)))
def test_no_control_character_is_left(text: str) -> None:
    left = {unicodedata.category(letter) for letter in printable(text) if letter not in "\t\n"}
    assert not left & {"Cc", "Cs", "Zl", "Zp"}
    assert not CONTROLS.search(printable(text))
    if not CONTROLS.search(text):
        assert printable(text) == text


def test_streams_are_filtered_once_and_the_stream_below_stays_reachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    below = io.StringIO()
    monkeypatch.setattr(sys, "stdout", below)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    guard_output()
    guard_output()
    print("\x1b[2J", flush=True)
    sys.stdout.writelines(["\x07", "\n"])
    assert below.getvalue() == "\\x1b[2J\n\\x07\n"
    assert unguarded(sys.stdout) is below is unguarded(below)
    unguarded(sys.stdout).write("\x1b[0m")
    assert below.getvalue().endswith("\x1b[0m")


@pytest.mark.parametrize(
    "says",
    [
        "raise ValueError(HOSTILE)",
        "warnings.warn(HOSTILE)",
        "logging.getLogger('a').error(HOSTILE)",
        "threading.Thread(target=int, args=[HOSTILE + chr(0x1b)]).start()",
        "asyncio.run(asyncio.sleep(0, sys.stderr.write(HOSTILE)))",
        "log.setup('a'); log.get('a').error(HOSTILE, why=HOSTILE, **{HOSTILE: HOSTILE})",
        "log.get('a').error(HOSTILE, whys=[HOSTILE])",
        "traceback.print_exception(ValueError(HOSTILE))",
    ],
)
def test_output_of_python_and_loggers_is_filtered(says: str) -> None:
    code = f"""
import asyncio, logging, sys, threading, traceback, warnings
from arealite.base.printable import guard_output
from tests.hostile import HOSTILE
guard_output()
from arealite.base import log
{says}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    said = (done.stdout + done.stderr).decode()
    assert SHOWN in said.replace("\\\\", "\\") and not controls_in(said)
