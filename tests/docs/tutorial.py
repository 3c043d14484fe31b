"""Run a tutorial as its reader would: run its commands and compare their output.

A tutorial is plain Markdown. Only the last point below exists for this harness.

* All ```bash blocks run in order in one shell, in a folder where `train.py`, `tools/`, `config/`, …
  are links to the checkout. `&`, `kill %1`, `cd` and `export` work. Processes that still run at the
  end are killed. Each command must succeed.
* A ```text block shows the output of the commands before it. Its lines must appear in this order;
  other lines may appear between them. `…` matches anything, a number of two or more characters
  matches any number, and spaces match any spaces. If a line begins with `error:`, the commands must
  fail.
* Any other block is a file. The paragraph above it names the file and ends like: in `my_agent.py`:
* If a ```python block of a page begins with `%%writefile NAME`, the page is a notebook: its
  ```python blocks are cells. They run in order in one process (see cells.py), where the first cell
  is; all ```bash blocks below run after them.
* `<!-- not run: why -->` above a block skips it. The summary of the tests shows the reason.

All files of a run are below the folder, HOME included, so tutorials can run concurrently.
`python3 tools/demo_task.py kit` and `arealite quickstart --kit kit` copy a kit that the session
creates once; LESSON_KITS share one, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from tests.docs import fork_server, guarded

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
KIT, QUICK_KIT = "tools/demo_task.py kit", "quickstart --kit kit"
LESSON_KITS = [
    f"tools/learn.py {lesson} --kit calculator" for lesson in ("calculator", "foreign_agent")
]
"""Commands that make the same kit; the first one that runs makes it for all."""
CONSOLE_SCRIPT = """import sys

from arealite.cli.main import main

sys.argv[0] = "arealite"
sys.exit(main())
"""
"""The installed program `arealite`, which does not import from the current folder."""
FORKED = ("train.py", "arealite/launch_llm_server.py")
"""Scripts that run in a fork, like the program `arealite`."""
CELLS = Path(__file__).with_name("cells.py")
LINKED = ("arealite", "config", "docs", "examples", "launchers", "tests", "tools", "train.py")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->$", re.DOTALL)
NAMED = re.compile(r"\b[Ii]n `([^`\s]+)`[^`]*:$")
ERROR = re.compile(r"^(error|\w+Error):", re.MULTILINE)
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MARK = "\x1e"


@dataclass(frozen=True)
class Block:
    """A fenced block of a tutorial."""

    line: int
    language: str
    """The word "cell" for a cell of a notebook."""
    body: str
    file: str = ""
    """File that the block is written to; empty for commands and output."""
    not_run: str = ""
    """Reason to skip the block; empty if it runs."""
    fails: bool = False
    """Whether the commands must fail, because an error is shown below them."""


def blocks(text: str, *, is_notebook: bool = False) -> list[Block]:
    """Return the fenced blocks of a tutorial in their order.

    Args:
        text: The page.
        is_notebook: Whether its python blocks are cells, although none begins with %%writefile.
    """
    found = list[Block]()
    is_notebook = is_notebook or "```python\n%%writefile " in text
    for match in FENCE.finditer(text):
        line, language, body = text.count("\n", 0, match.start()) + 1, match[1], match[2]
        above = text[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
        comment = NOT_RUN.search(above)
        why = " ".join(comment[1].split()) if comment else ""
        name = NAMED.search(NOT_RUN.sub("", above).rstrip())
        file = name[1] if name and language not in ("bash", "text") else ""
        if is_notebook and language == "python":
            body = f"%%writefile {file}\n{body}" if file else body
            language, file = "cell", ""
        if language == "text" and found and ERROR.search(body):
            found[-1] = replace(found[-1], fails=True)
        known = language in ("bash", "text", "cell")
        assert why or file or known, f"line {line}: in which `file`:?"
        assert Path(file).parts[:1] not in {(each,) for each in LINKED}, f"{file} is the checkout's"
        found.append(Block(line, language, body, file, why))
    fences = len(re.findall("^```", text, re.MULTILINE))
    assert fences == 2 * len(found), "a fence with more than one word, or without its end"
    return found


def script(folder: Path, found: list[Block]) -> str:
    """Return the shell script that writes the files and runs the commands up to a mismatch."""
    lines = ["set -mE", "trap 'status=$?' ERR", "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    (folder / ".blocks").mkdir()
    cells = [(b.line, b.body, b.fails) for b in found if b.language == "cell" and not b.not_run]
    if cells:
        (folder / ".blocks/cells.json").write_text(json.dumps(cells))
    for block in found:
        if block.not_run or block.language == "text":
            continue
        if block.language == "cell":
            if block.line == cells[0][0]:
                lines.append(f"python3 {CELLS} {folder}/.blocks/cells.json || exit 1")
            continue
        source = folder / ".blocks" / str(block.line)
        source.write_text(block.body)
        if block.file:
            lines.append(f"mkdir -p $(dirname {block.file}) && cp {source} {block.file}")
        else:
            lines.append(f"status=0; . {source}")
            lines.append(f'printf "\\n{MARK}{block.line} $status\\n"')
            lines.append(f"[ $status {'!=' if block.fails else '='} 0 ] || exit 1")
    return "\n".join(lines) + "\n"


def run(
    tutorial: Path,
    folder: Path,
    kit: Path,
    *,
    is_notebook: bool = False,
    timeout_s: float = 900,
    forks: bool = True,
) -> None:
    """Run a tutorial in a new folder and compare its output.

    Args:
        tutorial: The page.
        folder: The new folder.
        kit: The demo's kit.
        is_notebook: See `blocks`.
        timeout_s: Time limit.
        forks: Whether commands of AReaLite are forks of a process that has imported it.

    Raises:
        AssertionError: The exit code of a command differs, or a shown line is missing.
    """
    found = blocks(tutorial.read_text(), is_notebook=is_notebook)
    environment = prepare(folder, kit, fork_server.start() if forks else "")
    (folder / ".script").write_text(script(folder, found))
    with (folder / ".out").open("w+b") as output:
        shell = subprocess.Popen(
            ["bash", ".script"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            shell.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{tutorial.name} hangs:\n{tail((folder / '.out').read_text())}")
        finally:
            kill_remaining(folder)
            shell.wait()
    shown = (folder / ".out").read_text(errors="replace")
    compare(tutorial.name, found, ESCAPE.sub("", shown))


def prepare(folder: Path, kit: Path, forks: str) -> dict[str, str]:
    """Create checkout, home and commands of a reader in a folder; return the environment.

    Args:
        folder: The folder.
        kit: The demo's kit.
        forks: Socket of the server that forks commands; "": each is a new interpreter.
    """
    for name in LINKED:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    commands = folder / ".bin"
    commands.mkdir()
    (folder / ".home").mkdir()
    (commands / "program.py").write_text(CONSOLE_SCRIPT)
    program = f"{sys.executable} -P {commands}/program.py"
    scripts = ""
    if forks:
        client = f"{sys.executable} -I -S {guarded.CLIENT} {forks} {sys.executable}"
        program = f"{client} {commands}/program.py"
        scripts = f'case "$1" in {"|".join(FORKED)}) exec {client} "$@" ;; esac\n'
    copies = f'[ "$*" = "{KIT}" ] && exec cp -r {kit} kit\n' + lesson_kits(kit.parent / "lesson")
    python = f'#!/bin/sh\n{copies}{scripts}exec {sys.executable} "$@"\n'
    (commands / "python3").write_text(python)
    copies = f'[ "$*" = "{QUICK_KIT}" ] && exec cp -r {kit} kit\n'
    (commands / "arealite").write_text(f'#!/bin/sh\n{copies}exec {program} "$@"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {
        "PATH": path,
        "HOME": str(folder / ".home"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        guarded.SERVER: forks,
    }


def lesson_kits(shared: Path) -> str:
    """Return lines of a shell script for LESSON_KITS: make the kit and its output, or copy them."""
    commands = "|".join(f'"{command}"' for command in LESSON_KITS)
    make = f'{sys.executable} "$@" >{shared}/output && cp -r calculator {shared}'
    return (
        f'case "$*" in {commands})\n'
        f"    mkdir -p {shared} && exec 9>{shared}/lock && flock 9 || exit\n"
        f"    if [ -d {shared}/calculator ]; then cp -r {shared}/calculator .; else {make}; fi\n"
        f"    exec cat {shared}/output ;;\n"
        "esac\n"
    )


def kill_remaining(folder: Path) -> None:
    """Kill the processes whose working directory is in a folder."""
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder):
                process.kill()
        except (psutil.Error, OSError):
            continue


def compare(name: str, found: list[Block], output: str) -> None:
    """Check the exit code of each command and the lines of each text block."""
    came = dict(segments(output))
    status, text = 0, ""
    for block in found:
        where = f"{name}:{block.line}"
        if block.language in ("bash", "cell"):
            status, text = 0, ""
            if not block.not_run:
                assert block.line in came, f"{where} did not end:\n{tail(output)}"
                status, text = came[block.line]
                ended = f"{where} {'failed' if status else 'did not fail, as is shown'}"
                assert block.fails == bool(status), f"{ended}:\n{tail(text)}"
        elif block.language == "text" and not block.not_run:
            missing = first_missing(block.body, text)
            assert not missing, f"{where}: there came no line\n{missing}\nin\n{tail(text)}"


def segments(output: str) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield the line of each command block with its exit code and output."""
    pieces = re.split(rf"^{MARK}(\d+) (\d+)$", output, flags=re.MULTILINE)
    for text, line, status in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=False):
        yield int(line), (int(status), text)


def first_missing(shown: str, came: str) -> str:
    """Return the first line of `shown` that is missing or out of order; "" if none is."""
    lines = iter(came.splitlines())
    for line in shown.splitlines():
        wanted = pattern(line)
        if wanted.pattern and not any(wanted.fullmatch(" ".join(each.split())) for each in lines):
            return line
    return ""


def pattern(line: str) -> re.Pattern[str]:
    """Return the pattern that a shown line matches; empty for an empty line."""
    line = " ".join(line.split())
    if line == "…":
        line = ""
    pieces = []
    for piece in re.split(rf"(…|{NUMBER.pattern})", line):
        if piece == "…":
            pieces.append(".*")
        elif NUMBER.fullmatch(piece) and len(piece) > 1:
            pieces.append(NUMBER.pattern)
        else:
            pieces.append(re.escape(piece))
    return re.compile("".join(pieces))


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-40:])
