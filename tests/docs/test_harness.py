"""The tutorial harness runs the commands of a page and compares their output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import tutorial
from tests.waiting import until_exited


def run_text(folder: Path, text: str) -> Path:
    """Run a tutorial with this text in a new folder; return the folder."""
    file = folder / "guide.md"
    file.write_text(text)
    where, kit = folder / "scratch", folder / "kit"
    where.mkdir()
    kit.mkdir()
    tutorial.run(file, where, kit, timeout_s=200, forks=False)
    return where


def fence(language: str, body: str) -> str:
    return f"```{language}\n{body}\n```\n"


def test_one_shell_runs_all_blocks_and_files_are_written_in_order(tmp_path: Path):
    where = run_text(
        tmp_path,
        fence("bash", "export NAME=one\nmkdir inner && cd inner")
        + "\nPut this in `part.py`, beside it:\n\n"
        + fence("python", "import os\n\nprint(os.environ['NAME'], os.path.realpath('~'))")
        + fence("bash", "python3 part.py\nls $HOME/..")
        + fence("text", "one …/inner/~\n…"),
    )
    assert (where / "inner" / "part.py").exists()


def test_tutorial_can_use_the_checkout(tmp_path: Path):
    run_text(
        tmp_path,
        fence("bash", "arealite --version\npython3 train.py --help\npython3 tools/demo_task.py kit")
        + fence("text", "0.1.0\nusage: train.py …\n…"),
    )
    assert (tmp_path / "scratch" / "kit").is_dir()


@pytest.mark.parametrize(
    ("shown", "came"),
    [
        ("step 1/3  reward 0.25  tok/s 6,142", "step 1/3 reward 0.3 tok/s 12"),
        ("loss -0.1", "loss 2.5e-05"),
        ("a …\nb", "a 1\nother\nb"),
        ("…\n\nb", "b"),
    ],
)
def test_matching_output_is_accepted(shown: str, came: str):
    assert tutorial.first_missing(shown, came) == ""


@pytest.mark.parametrize(
    ("shown", "came", "missing"),
    [
        ("lost 0", "lost 1", "lost 0"),
        ("step 1/3", "step 1/3 reward 0.25", "step 1/3"),
        ("b\na", "a\nb", "a"),
        ("1.5", "a", "1.5"),
        ("(x)", "x", "(x)"),
    ],
)
def test_missing_output_line_is_detected(shown: str, came: str, missing: str):
    assert tutorial.first_missing(shown, came) == missing


def test_failed_command_is_reported(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"guide.md:4 failed:\s+mended"):
        run_text(tmp_path, fence("bash", "true") + fence("bash", "false\necho mended"))


def test_shown_error_is_expected(tmp_path: Path):
    shown = fence("text", "error: 3 is odd.")
    run_text(
        tmp_path,
        fence("bash", "echo 'error: 3 is odd.'; exit_code() { return 2; }; exit_code") + shown,
    )


def test_missing_failure_is_reported(tmp_path: Path):
    with pytest.raises(AssertionError, match="did not fail"):
        run_text(
            tmp_path, fence("bash", "echo 'error: 3 is odd.'") + fence("text", "error: 3 is odd.")
        )


def test_background_processes_are_killed(tmp_path: Path):
    loop = "(setsid sh -c 'echo $$ > pid; exec sleep 600') &\nuntil [ -s pid ]; do :; done"
    where = run_text(tmp_path, fence("bash", loop))
    pid = int((where / "pid").read_text())
    until_exited(pid)


def test_block_marked_not_run_is_skipped_with_its_reason(tmp_path: Path):
    text = "Install:\n\n<!-- not run: it takes\nlong -->\n" + fence("bash", "exit 3")
    assert [block.not_run for block in tutorial.blocks(text)] == ["it takes long"]
    run_text(tmp_path, text)


def test_output_of_a_skipped_command_is_reported_as_missing(tmp_path: Path):
    with pytest.raises(AssertionError, match="there came no line"):
        run_text(tmp_path, "<!-- not run: a -->\n" + fence("bash", "echo 1") + fence("text", "1"))


@pytest.mark.parametrize(
    "text",
    [
        "Some code:\n\n" + fence("python", "x = 1"),
        "Some code in `tools/x.py`:\n\n" + fence("python", "x = 1"),
        fence('python title="x.py"', "x = 1"),
    ],
)
def test_block_without_a_file_name_is_refused(text: str):
    with pytest.raises(AssertionError):
        tutorial.blocks(text)


def notebook(*cells: str) -> str:
    return fence("bash", "echo first") + "\n".join(fence("python", each) for each in cells)


def test_cells_of_a_notebook_share_names_and_a_running_loop(tmp_path: Path):
    where = run_text(
        tmp_path,
        notebook(
            "%%writefile part.py\ndef double(x):\n    return 2 * x",
            "import asyncio\n\nfrom part import double\n\nasyncio.get_running_loop() and None",
            "value = double(21)\nawait asyncio.sleep(0)\nvalue",
        )
        + fence("text", "42")
        + fence("python", "raise ValueError('3 is odd')")
        + fence("text", "ValueError: 3 is odd")
        + fence("python", "__name__, hasattr(__import__('__main__'), '__file__'), value")
        + fence("text", "('__main__', False, 42)"),
    )
    assert (where / "part.py").read_text().startswith("def double")


def test_failed_cell_is_reported(tmp_path: Path):
    cells = notebook("%%writefile part.py\nx = 1", "import part\n\npart.y")
    with pytest.raises(AssertionError, match=r"guide.md:9 failed:[\s\S]*AttributeError"):
        run_text(tmp_path, cells)


def test_unexpected_value_of_a_cell_is_reported(tmp_path: Path):
    cells = notebook("%%writefile part.py\nx = 1", "import part\n\npart.x")
    with pytest.raises(AssertionError, match="there came no line"):
        run_text(tmp_path, cells + fence("text", "2"))
