"""Files of dead processes in /dev/shm and below cluster.name_root are removed; others stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.api.publisher import DiskPublisherConfig, PublisherConfig
from arealite.api.trial import ClusterConfig
from arealite.base.files import lock_folder
from arealite.base.trial_files import TMPFS
from arealite.impl.launcher.local import clear_leftovers
from arealite.system.names.name_registry import NameRegistry
from tests.impl.launcher.test_local import UNTIL_TERM
from tests.impl.launcher.test_starting import launched, showing
from tests.system.health.living import IDLE, MY_START, living, show
from tests.waiting import until, until_exited

STAGES = """
import threading
from arealite.base.trial_files import TMPFS
from arealite.impl.launcher.processes import die_with_parent
from arealite.base.files import lock_folder
die_with_parent()
folder = TMPFS / f"arealite-{os.getuid()}-{os.getpid()}-test"
folder.mkdir()
handle = lock_folder(folder)
(folder / "v1").mkdir()
(folder / "v1" / "model.safetensors").write_bytes(bytes(4096))
open(os.environ["NAMES"] + "/staged", "a").write(f"{os.getpid()}\\n")
threading.Event().wait()
"""


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    cluster = ClusterConfig(name_root=str(tmp_path / "names"), run_root=str(tmp_path / "runs"))
    config = ExperimentConfig(cluster=cluster)
    (name_dir(config) / "vitals").mkdir(parents=True)
    return config


@pytest.fixture
def dead() -> int:
    """The id of a process that has exited."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def staged(parent: Path, pid: int) -> Path:
    folder = parent / f"arealite-{os.getuid()}-{pid}-{os.urandom(4).hex()}"
    folder.mkdir(parents=True)
    (folder / "v1").mkdir()
    return folder


def files(config: ExperimentConfig) -> set[str]:
    return {
        str(f.relative_to(name_dir(config))) for f in name_dir(config).rglob("*") if f.is_file()
    }


def test_dead_process_of_the_trial_leaves_nothing(
    config: ExperimentConfig, dead: int, tmp_path: Path
) -> None:
    ppo = replace(
        config.trainer.ppo,
        publisher=PublisherConfig(disk=DiskPublisherConfig(dir=str(tmp_path / "disk"))),
    )
    config = replace(config, trainer=replace(config.trainer, ppo=ppo))
    vitals, names = name_dir(config) / "vitals", NameRegistry.of(config)
    for role in ("trainer-0", "llm_server-127.0.0.1-8001"):
        show(vitals, role, pid=dead, age_s=1.0)
        for suffix in ("dump", "stacks"):
            (vitals / f"{role}.{suffix}").touch()
        (vitals / f".{role}.json").touch()
    names.put("llm_server", "127.0.0.1-8001", {"pid": dead})
    parents = (TMPFS, tmp_path / "disk", run_paths(config).weights)
    folders = [staged(parent, dead) for parent in parents]
    clear_leftovers(config)
    assert not files(config)
    assert not [folder for folder in folders if folder.exists()]


def test_files_of_live_processes_and_other_trials_stay(config: ExperimentConfig, dead: int) -> None:
    vitals, names = name_dir(config) / "vitals", NameRegistry.of(config)
    other = staged(TMPFS, dead)  # no vitals of this trial name its process
    handles = list[int]()
    try:
        with living("llm_server-127.0.0.1-8001", vitals, IDLE) as process:
            names.put("llm_server", "127.0.0.1-8001", {"pid": process.pid})
            show(vitals, "rollout-0", host="elsewhere", age_s=1.0)
            show(vitals, "trainer-0", pid=os.getpid(), started=MY_START + 1, age_s=1.0)
            mine = staged(TMPFS, os.getpid())  # a later process has the id of the dead trainer
            handles.append(lock_folder(mine))
            before = files(config) - {"vitals/trainer-0.json"}
            clear_leftovers(config)
            assert files(config) == before
            assert mine.exists() and other.exists()
            clear_leftovers(config, "rollout")
            assert not (vitals / "rollout-0.json").exists()
            assert (vitals / "llm_server-127.0.0.1-8001.json").exists()
    finally:
        for handle in handles:
            os.close(handle)
        for folder in (other, mine):
            (folder / ".lock").unlink(missing_ok=True)
            (folder / "v1").rmdir()
            folder.rmdir()


@pytest.fixture
def scripted(tmp_path: Path) -> ExperimentConfig:
    """The config of the launchers that `launched` runs."""
    cluster = ClusterConfig(name_root=str(tmp_path / "names"), run_root=str(tmp_path))
    return ExperimentConfig(experiment_name="e", trial_name="t", cluster=cluster)


def staging(root: Path, count: int) -> list[int]:
    """Wait until `count` trainer ranks have staged weights; return their process ids."""
    file = root / "names" / "staged"
    enough = lambda: file.exists() and len(file.read_text().split()) >= count  # noqa: E731
    until(enough, what=f"{count} ranks that stage")
    return [int(pid) for pid in file.read_text().split()]


def left(pids: list[int]) -> list[Path]:
    return [each for pid in pids for each in TMPFS.glob(f"arealite-{os.getuid()}-{pid}-*")]


@pytest.mark.parametrize("end", ["given up", "stopped twice"])
def test_no_file_remains_of_a_run_whose_trainer_was_killed(
    tmp_path: Path, scripted: ExperimentConfig, end: str
) -> None:
    with launched(tmp_path, restarts=0, trainer=showing("trainer", STAGES)) as launcher:
        pids = staging(tmp_path, 2)
        assert len(left(pids)) == 2
        if end == "given up":
            os.kill(pids[0], signal.SIGKILL)
        else:
            launcher.send_signal(signal.SIGINT)
            assert launcher.stdout is not None
            assert "stopping" in launcher.stdout.readline()
            launcher.send_signal(signal.SIGINT)
        shown = launcher.communicate(timeout=120)[0]
        assert launcher.returncode == (1 if end == "given up" else 130), shown
    assert not left(pids)
    assert files(scripted) <= {".lock"}


def test_files_of_a_killed_trainer_are_removed_before_its_restart(tmp_path: Path) -> None:
    with launched(tmp_path, trainer=showing("trainer", STAGES)):
        first = staging(tmp_path, 2)
        os.kill(first[0], signal.SIGKILL)
        both = staging(tmp_path, 4)
        assert not left(first)
        assert len(left(both)) == 2


def test_next_launcher_removes_files_of_a_killed_launcher(
    tmp_path: Path, scripted: ExperimentConfig
) -> None:
    with launched(tmp_path, trainer=showing("trainer", STAGES)):
        pids = staging(tmp_path, 2)
        NameRegistry.of(scripted).put("datapipe", "0", {"pid": pids[0]})
    until_exited(*pids)
    assert len(left(pids)) == 2
    vitals = name_dir(scripted) / "vitals"
    assert (vitals / "trainer-0.json").exists()
    with launched(tmp_path, trainer="import time; time.sleep(600)", datapipe=UNTIL_TERM):
        until(lambda: not (vitals / "trainer-0.json").exists(), what="the vitals' end")
        until(lambda: not left(pids), what="the end of the weights")
        until(lambda: "datapipe/0.json" not in files(scripted), what="the name's end")
