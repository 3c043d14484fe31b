"""The wheel, installed into an empty environment and used in an empty folder."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.docs.tutorial import ROOT

pytestmark = [
    pytest.mark.docs,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("wheel"),  # its fixtures are expensive
]
RUN = "runs/demo/quickstart"


def output(*command: object, cwd: Path, code: int = 0) -> str:
    """Run a command without this checkout on its path; return stdout and stderr."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "RANK")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, text=True, capture_output=True, timeout=600)
    shown = done.stdout + done.stderr
    assert done.returncode == code, f"{' '.join(words)} ended with {done.returncode}: {shown}"
    return shown


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment that has the packages of this one, not the checkout."""
    root = tmp_path_factory.mktemp("wheel")
    build = ["wheel", ROOT, "--no-deps", "--no-build-isolation", "--quiet", "-w", root / "dist"]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    venv.create(root / "venv", symlinks=True)
    python, (wheel,) = root / "venv/bin/python", (root / "dist").glob("*.whl")
    install = ["install", "--no-deps", "--no-index", "--quiet", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    folder = output(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=root)
    # The .pth files of a folder that is named in a .pth file are not read: no editable checkout.
    (Path(folder.strip()) / "packages.pth").write_text("\n".join(site.getsitepackages()))
    return python.parent


@pytest.fixture(scope="module")
def reader(bin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty folder after `arealite quickstart` trained three steps in it."""
    folder = tmp_path_factory.mktemp("empty")
    short = ["trainer.ppo.total_steps=3", "trainer.ppo.batch_size=64"]
    names = f"cluster.name_root={folder / 'names'}"
    shown = output(bin_folder / "arealite", "quickstart", *short, names, cwd=folder)
    assert "step 3/3" in shown
    assert "balanced: nothing lost, nothing repeated" in shown
    assert f"arealite report {folder / RUN}" in shown
    return folder


def test_package_comes_from_the_wheel(bin_folder: Path, tmp_path: Path) -> None:
    code = "import arealite; print(arealite.__file__)"
    shown = output(bin_folder / "python", "-c", code, cwd=tmp_path)
    assert shown.startswith(str(bin_folder.parent)), shown


def test_quickstart_run_has_a_report_and_an_audit(bin_folder: Path, reader: Path) -> None:
    output(bin_folder / "arealite", "report", RUN, cwd=reader)
    assert (reader / RUN / "report.html").stat().st_size > 100_000
    assert "nothing lost" in output(bin_folder / "arealite", "audit", RUN, cwd=reader)


def test_presets_are_found_by_name(bin_folder: Path, reader: Path) -> None:
    arealite, kit = bin_folder / "arealite", reader / "runs/demo/kit-seed1"
    listed = output(arealite, "presets", cwd=reader)
    assert "\nalgo/gspo " in listed and "\nenv/code " in listed
    words = [f"model.path={kit / 'model'}", f"dataset.train={kit / 'train.jsonl'}"]
    for names in (["demo", "algo/gspo"], ["config/demo.yaml", "config/algo/gspo.yaml"]):
        files = [word for name in names for word in ("--config", name)]
        assert "ok: all checks passed" in output(arealite, "check", *files, *words, cwd=reader)
    wrong = output(arealite, "train", "--config", "algo/gsppo", cwd=reader, code=2)
    assert "Did you mean 'algo/gspo'?" in wrong


def test_hints_name_the_package(bin_folder: Path, tmp_path: Path) -> None:
    code = "from arealite.base.extras import extra_requirement as e; print(e('browser'))"
    shown = output(bin_folder / "python", "-c", code, cwd=tmp_path)
    assert shown.strip() == "'arealite[browser]'"
    shown = output(bin_folder / "arealite", "train", "--model", "m", cwd=tmp_path, code=2)
    assert shown == "error: --model is no option of the command. Write model.path=m.\n"


SCRIPT = """\
import sys

import arealite
from my_reward import in_order

if __name__ == "__main__":
    kit, names = sys.argv[1:]
    numbers = [str(number) for number in range(123456, 123520)]
    rows = [{"prompt": f"{n}=", "ground_truth": "".join(sorted(n))} for n in numbers]
    options = {"trainer.ppo.total_steps": 2, "trainer.ppo.batch_size": 64}
    run = arealite.train(
        "demo", model=f"{kit}/model", dataset=rows, reward=in_order,
        overrides={**options, "cluster.name_root": names},
    )
    print("audit:", run.summary["balanced"])
    assert {row["step"] for row in run.trajectories(step=2)} == {2}
    with arealite.make("tic_tac_toe") as env:
        print([each.actor for each in env.reset(seed=1)])
"""
REWARD = """\
def in_order(completion, ground_truth):
    return float(completion == ground_truth)
"""


def test_python_api_trains_and_plays(bin_folder: Path, reader: Path) -> None:
    (reader / "my_reward.py").write_text(REWARD)
    (reader / "script.py").write_text(SCRIPT)
    words = [reader / "runs/demo/kit-seed1", reader / "names"]
    shown = output(bin_folder / "python", "script.py", *words, cwd=reader)
    assert "step 2/2" in shown
    assert "audit: True" in shown
    assert "['x']" in shown
