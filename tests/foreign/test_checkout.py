"""A checkout on PYTHONPATH works, although no distribution of AReaLite is installed."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT
from tests.foreign.conftest import Place

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

OPTIONS = (
    "trainer.ppo.collector.env.type=reverse",
    "trainer.ppo.total_steps=1",
)


@pytest.fixture(scope="module")
def place(folder: Path) -> Place:
    """Return a Python without AReaLite's metadata: links to all other packages, and the checkout.

    Python reads no .pth file in a folder of PYTHONPATH, so an editable installation has no effect.
    """
    packages = folder / "packages"
    packages.mkdir()
    for name in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_path(name)).iterdir():
            link = packages / entry.name
            if not entry.name.startswith("arealite") and not link.exists():
                link.symlink_to(entry)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)]),
        "PYTHONNOUSERSITE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    python = getattr(sys, "_base_executable", sys.executable)
    return Place(folder, [python, "-m", "arealite"], environment)


def test_no_distribution_is_there(place: Place) -> None:
    program = [
        place.program[0],
        "-c",
        "from importlib import metadata; metadata.version('arealite')",
    ]
    done = Place(place.folder, program, place.environment).call()
    assert "PackageNotFoundError" in done.stderr


def test_help_lists_the_commands(place: Place) -> None:
    done = place.call("--help")
    assert done.returncode == 0 and "quickstart" in done.stdout, done.stderr


def test_check_accepts_a_run(place: Place) -> None:
    done = place.call("check", *place.run_options(*OPTIONS))
    assert done.returncode == 0 and "ok: all checks passed" in done.stdout, done.stderr


def test_run_trains_a_step(place: Place) -> None:
    done = place.train(*OPTIONS)
    assert done.code == 0, done.shown + done.logs()
    assert [line["step"] for line in done.metrics() if "reward/mean" in line] == [1]
