"""Workers start and stop as the datapipe requests; a stop is no death and no end of the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.impl.launcher import supervisor
from arealite.impl.launcher.processes import Child
from arealite.impl.launcher.supervisor import Role
from tests.impl.launcher.test_local import SUICIDE, ScriptedLauncher, launched, trains

DATAPIPE = """
import os, time
from pathlib import Path
from arealite.system.names.name_registry import NameRegistry
names, desired = NameRegistry(root=Path("{names}")), Path("{root}/desired")
while not os.path.exists("{root}/done"):
    if desired.exists(): names.put("datapipe", "0", {{"workers": int(desired.read_text())}})
    time.sleep(0.05)
"""
WORKER = """
import os, signal, sys, threading, time
ended, stop = "{root}/ended-" + sys.argv[1], threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
open("{root}/began-" + sys.argv[1], "a").write("x")
while not (stop.is_set() or os.path.exists("{root}/done")): time.sleep(0.02)
if not os.path.exists("{root}/done"): open(ended, "a").write("x")
"""
TRAINER = """
import os, time
def desired(count):
    open("{root}/desired.new", "w").write(str(count))
    os.replace("{root}/desired.new", "{root}/desired")
def until(name, lives):
    while not os.path.exists("{root}/" + name) or len(open("{root}/" + name).read()) < lives:
        time.sleep(0.02)
if os.environ["RANK"] == "0":
{steps}
    open("{root}/done", "w")
while not os.path.exists("{root}/done"): time.sleep(0.02)
"""


class Elastic(ScriptedLauncher):
    """A run of up to three workers; `steps` of the trainer set the number of workers."""

    def __init__(self, root: Path, steps: list[str], *, worker: str = WORKER, restarts: int = 0):
        self.root, about = root, {"root": root, "names": root / "unknown"}
        scripts = {"datapipe": "", "rollout": worker.replace("{root}", str(root)), "trainer": ""}
        super().__init__(root, scripts, restarts=restarts)
        self.options = replace(self.options, max_workers=3)
        about["names"] = self._names.root
        scripts["datapipe"] = DATAPIPE.format(**about)
        lines = "\n".join(f"    {step}" for step in steps)
        scripts["trainer"] = TRAINER.format(**about, steps=lines) + trains(0)

    def command(self, role: str, index: int) -> list[str]:
        return [*super().command(role, index), str(index)]

    def _resized(self, wanted: int) -> list[Role]:
        added = super()._resized(wanted)
        (self.root / f"heard-{wanted}").touch()
        return added


def lives(root: Path, what: str) -> str:
    file = root / what
    return file.read_text() if file.exists() else ""


def test_workers_are_added_stopped_and_added_again(tmp_path: Path) -> None:
    steps = [
        "desired(3); until('began-1', 1); until('began-2', 1)",
        "desired(1); until('ended-2', 1); until('ended-1', 1)",
        "desired(2); until('began-1', 2)",
    ]
    code, shown, launcher = launched(Elastic(tmp_path, steps))
    assert code == 0, shown
    assert shown.count("is started: the other workers are full") == 3
    assert shown.count("is stopped: fewer workers are needed") == 2
    assert "died" not in shown
    assert lives(tmp_path, "began-0") == "x" and not lives(tmp_path, "ended-0")
    assert sorted(n for role in launcher.roles for n in role.names if "rollout" in n) == [
        "rollout-0",
        "rollout-1",
    ]


def test_at_most_max_workers_are_started(tmp_path: Path) -> None:
    code, shown, _ = launched(
        Elastic(tmp_path, ["desired(9); until('began-2', 1); time.sleep(1.2)"])
    )
    assert code == 0, shown
    assert shown.count("is started") == 2


def test_worker_that_dies_repeatedly_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.0, 2.0))
    first = "import os, signal, sys\nif sys.argv[1] == '1':\n"
    dying = f"    open('{{root}}/began-1', 'a').write('x'); {SUICIDE}\n"
    steps = ["desired(2); until('began-1', 2)", "desired(1); until('heard-1', 0)"]
    worker = first + dying + WORKER
    code, shown, _ = launched(Elastic(tmp_path, steps, worker=worker, restarts=99))
    assert code == 0, shown
    assert "rollout-1 died (killed by SIGKILL); started again (1 of 99)" in shown
    assert "rollout-1 is stopped: fewer workers are needed" in shown


class EarlyStopLauncher(Elastic):
    """The datapipe no longer needs a worker that is being started and ignores signals."""

    is_first = True

    async def spawn(self, name: str, command: Sequence[str], *about: Any) -> Child:
        if name != "rollout-1" or not self.is_first:
            return await super().spawn(name, command, *about)
        self.is_first = False
        stays = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = await super().spawn(name, stays, *about)
        self._resized(1)
        return child


def test_worker_that_is_stopped_while_it_starts_exits(tmp_path: Path) -> None:
    late = f"time.monotonic() > end or os.path.exists('{tmp_path}/began-1')"
    steps = ["desired(2); end = time.monotonic() + 60", f"while not ({late}): time.sleep(0.02)"]
    code, shown, _ = launched(EarlyStopLauncher(tmp_path, steps))
    assert code == 0, shown
    assert lives(tmp_path, "began-1") == "x"


def test_new_worker_has_the_first_free_name_while_another_exits(tmp_path: Path) -> None:
    launcher = Elastic(tmp_path, [])
    for name in ("rollout-1", "rollout-2"):
        assert [role.names for role in launcher._resized(3)] == [(name,)]
    launcher._resized(1)  # both are exiting, and the first has exited
    launcher.roles = [role for role in launcher.roles if role.names != ("rollout-1",)]
    assert [role.names for role in launcher._resized(3)] == [("rollout-1",)]
