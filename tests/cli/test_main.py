"""The command line: fast help, one-line errors, the same commands from any folder."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from arealite import __version__
from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_unknown_command_suggests_the_closest_one(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_help_imports_no_heavy_module():
    code = (
        "import sys; from arealite.cli.main import main; main(['--help']); "
        "heavy = ('torch', 'transformers', 'aiohttp', 'zmq', 'numpy'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (UserError("wrong"), 2),
        (RoleError("gone"), 4),
        (ExceptionGroup("tasks", [ValueError("x"), InvariantError("broken")]), 3),
    ],
)
def test_deliberate_errors_are_one_line_with_their_exit_code(
    raised: Exception,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def fail(argv: object) -> int:
        raise raised

    monkeypatch.setattr("arealite.ext.audit.command.main", fail)
    assert cli.main(["audit", "x"]) == code
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] in ("error: wrong", "error: gone", "error: broken")
    assert (len(shown) == 1) == (code == 2), "a traceback for what is no user's mistake"


def test_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def fail(argv: object) -> int:
        raise ExceptionGroup("tasks", [ValueError("x")])

    monkeypatch.setattr("arealite.ext.audit.command.main", fail)
    with pytest.raises(ExceptionGroup):
        cli.main(["audit", "x"])


@pytest.mark.parametrize("script", ["train.py", "arealite/launch_llm_server.py"])
def test_scripts_run_from_a_checkout_in_any_folder(script: str, tmp_path: Path):
    command = [sys.executable, str(ROOT / script), "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "model.path=" in shown.stdout
    assert "Hugging Face folder" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "trainer.ppo.lrr=1"], "Did you mean 'trainer.ppo.lr'?"),
        (["train", "--config", "nowhere.yaml"], "does not exist"),
        (["train"], "model.path is not set"),
        (["serve-llm", "llm_server.prot=1"], "Did you mean 'llm_server.port'?"),
        (["audit", "nowhere"], "no ledger at"),
    ],
)
def test_invalid_argument_is_a_one_line_error_with_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [["train", "--help"], ["--help"], ["--version"], ["envs"], ["info"]],
    ids=" ".join,
)
def test_closed_stdout_pipe_causes_no_traceback(words: list[str]):
    """The reader of stdout has exited, as after `| head`."""
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "arealite.cli.main", *words]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_broken_pipe_of_a_child_is_raised(monkeypatch: pytest.MonkeyPatch):
    def breaks(argv: object) -> int:
        raise BrokenPipeError("a child's")

    monkeypatch.setattr("arealite.ext.audit.command.main", breaks)
    with pytest.raises(BrokenPipeError, match="a child's"):
        cli.run("arealite.ext.audit.command", [])


def test_closed_socket_causes_no_traceback():
    """Some programs give their children a socket as stdout; its reader has exited."""
    read, write = socket.socketpair()
    read.close()
    with write:
        command = [sys.executable, "-m", "arealite.cli.main", "info"]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def run_python(
    *words: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run this Python with further environment variables; return the result and its lines."""
    command = [sys.executable, *words]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    return done, (done.stdout + done.stderr).splitlines()


def test_python_m_arealite_is_the_command() -> None:
    done, lines = run_python("-m", "arealite", "--version")
    assert (done.returncode, lines) == (0, [__version__])
    done, lines = run_python("-m", "arealite", "trian")
    assert done.returncode == 2 and "Did you mean 'train'?" in lines[0]


def test_import_of_the_package_imports_no_command() -> None:
    code = "import arealite, sys; print([n for n in sys.modules if n.startswith('arealite.')])"
    done, lines = run_python("-c", code)
    assert (done.returncode, lines) == (0, ["[]"])


@pytest.mark.parametrize("words", [["presets"], ["train", "--help"], ["check"], ["info"]])
def test_python_without_docstrings_is_refused_in_one_line(words: list[str]) -> None:
    done, lines = run_python("-m", "arealite.cli.main", *words, PYTHONOPTIMIZE="2")
    assert done.returncode == 2
    assert len(lines) == 1 and "PYTHONOPTIMIZE" in lines[0] and "docstrings" in lines[0]


def test_help_without_asserts_describes_the_command() -> None:
    for command in ("train", "eval", "collect", "quickstart", "secret", "serve", "play"):
        done, lines = run_python("-m", "arealite.cli.main", command, "--help", PYTHONOPTIMIZE="1")
        assert done.returncode == 0, lines
        assert "None" not in lines[:12]


def test_asserts_of_the_package_only_narrow_types() -> None:
    """`python -O` removes asserts, so none may check a value."""
    narrowing = (ast.Name, ast.Attribute, ast.BoolOp, ast.And, ast.Load, ast.IsNot, ast.Constant)
    for file in (ROOT / "arealite").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Assert) or "isinstance(" in ast.unparse(node.test):
                continue
            parts = [part for part in ast.walk(node.test) if not isinstance(part, ast.Compare)]
            checks = [part for part in parts if not isinstance(part, narrowing)]
            assert not checks, f"{file}:{node.lineno}: {ast.unparse(node)}"
