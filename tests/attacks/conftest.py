"""A live run with two workers and two ranks, which all modules except the first attack.

The order of modules is fixed: test_broken_worker.py has a separate run, test_end.py stops the
shared run and checks its files. With ATTACKED_SERVER=vllm (see kinds.py) the run has a real vLLM
server, and only the modules that attack a server are collected.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.system.names.name_registry import NameRegistry, Secret, read_secret
from tests.attacks.kinds import KIND, NAME, SERVER_TESTS
from tests.e2e.conftest import ENVIRONMENT, LEARNING, ROOT, SLOW_S, START_S, Site, all_gone, serving
from tests.waiting import until

FIRST, LAST = "test_broken_worker.py", "test_end.py"
FRAME_MB = 1
"""`datapipe.max_frame_mb` of the run."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules that attack nothing of the server, except with the embedded server."""
    is_test = collection_path.name.startswith("test_")
    is_left_out = is_test and NAME != "embedded" and collection_path.name not in SERVER_TESTS
    return True if is_left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the module with its own run first, and the module that ends the shared run last."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here)]
    ours.sort(key=lambda item: (item.path.name != FIRST, item.path.name == LAST, item.path.name))
    for item in ours:
        if NAME != "embedded":
            item.add_marker(pytest.mark.timeout(START_S + 2 * SLOW_S), append=False)
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(here)]
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@dataclass
class Live:
    """A live run."""

    site: Site
    root: Path
    names: Path
    """The trial's folder in the name registry."""
    process: subprocess.Popen[str]
    roles: dict[str, int] = field(default_factory=dict[str, int])
    """Process ids of the roles when the attacks began."""
    first_server_pid: int = 0
    """Process id of the server when the attacks began."""

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root / "e2e" / "t")

    @property
    def shown(self) -> str:
        """The output of the run."""
        return (self.root / "shown.txt").read_text()

    @property
    def datapipe(self) -> str:
        """The datapipe's address, tcp://HOST:PORT."""
        return NameRegistry(root=self.names, ttl_s=SLOW_S).address("datapipe") or ""

    @property
    def server(self) -> str:
        """URL of the language-model server."""
        return NameRegistry(root=self.names, ttl_s=SLOW_S).address("llm_server") or ""

    @property
    def server_pid(self) -> int:
        """Process id of the language-model server; 0 while it has no name."""
        names = NameRegistry(root=self.names, ttl_s=SLOW_S).list("llm_server")
        return names[0].value["pid"] if names else 0

    @property
    def secret(self) -> Secret:
        found = read_secret(self.names)
        assert found is not None
        return found

    @property
    def ours(self) -> dict[str, str]:
        """Return the HTTP headers of a process of the trial."""
        return {"Authorization": f"Bearer {self.secret.token}"}

    def metrics(self, name: str) -> list[float]:
        """Return a metric of the last steps."""
        return [line[name] for line in self.lines_with(name)]

    def steps_with(self, name: str) -> list[int]:
        """Return the last steps that have a metric."""
        return [line["step"] for line in self.lines_with(name)]

    def lines_with(self, name: str) -> list[dict[str, Any]]:
        """Return the metrics of the last steps that have one of this name."""
        if not self.paths.metrics.exists():
            return []
        with self.paths.metrics.open("rb") as file:
            file.seek(max(0, self.paths.metrics.stat().st_size - 2**16))
            whole = file.read().decode().split("\n")[:-1]
        lines = [json.loads(line) for line in whole if line.startswith("{") and f'"{name}"' in line]
        return [line for line in lines if name in line]

    def step(self) -> float:
        """Return the newest step in the metrics; -1 before the first."""
        return max(self.metrics("step"), default=-1.0)

    def rejected(self) -> float:
        """Return the number of rejected messages in the metrics of the newest step."""
        return max(self.metrics("datapipe/rejected_messages"), default=0.0)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def read(self, path: str) -> Any:
        """Return the server's answer to a process of the trial."""
        request = Request(self.server + path, headers=self.ours)
        with urlopen(request, timeout=SLOW_S) as answer:
            return json.load(answer)

    def version(self) -> str:
        """Return the version of the server's weights."""
        return self.read(KIND.version)["weight_version"]

    def is_untouched(self) -> bool:
        """Return whether the server has a version of the trainer and is not paused for long: a
        publish pauses it briefly. vLLM does not report for how long."""
        info = self.read(KIND.version)
        return info["weight_version"].isdigit() and (info.get("paused_s") or 0.0) < SLOW_S

    def wait_for_steps(self, steps: int = 2) -> None:
        """Wait until further steps are in the metrics."""
        begin = self.step()
        is_there = lambda: self.step() >= begin + steps or not self.is_alive()  # noqa: E731
        until(is_there, what=lambda: f"a step after {begin}\n{self.shown}", seconds=SLOW_S)
        assert self.is_alive(), self.shown

    def counts(self, before: float, number: int) -> None:
        """Check that exactly `number` further messages were rejected and counted."""
        are_there = lambda: self.rejected() >= before + number or not self.is_alive()  # noqa: E731
        what = f"{number} more rejected messages than {before}"
        told = lambda: f"{what}, not {self.rejected()}\n{self.shown}"  # noqa: E731
        until(are_there, what=told, seconds=SLOW_S)
        assert self.rejected() == before + number

    def pids(self) -> dict[str, int]:
        """Return the process ids of the run's roles, by role and index."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            words = process.cmdline()
            if "role" in words:
                place = words.index("role")
                found[f"{words[place + 1]}-{words[place + 2]}"] = process.pid
        return found

    def command(self, *words: str) -> str:
        """Return the output of an arealite command."""
        line = [sys.executable, "-m", "arealite.cli.main", *words]
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=SLOW_S, env=ENVIRONMENT, cwd=ROOT
        )
        return done.stdout + done.stderr


def start(site: Site, root: Path, *more: str) -> Live:
    """Start a run that trains until it is stopped, and wait for its first step."""
    root.mkdir(parents=True, exist_ok=True)
    command = site.command(root, "trainer.ppo.total_steps=100000", *LEARNING, *more)
    with (root / "shown.txt").open("w") as shown:
        process = subprocess.Popen(
            command, cwd=root, env=ENVIRONMENT, stdout=shown, stderr=subprocess.STDOUT, text=True
        )
    (names,) = (site.folder / "names").glob("*/e2e/t")
    live = Live(site, root, names, process)
    try:
        live.wait_for_steps(1)
        live.roles = live.pids()
        live.first_server_pid = live.server_pid
    except BaseException:
        process.kill()
        raise
    return live


def stop(live: Live) -> None:
    """Stop a run as a user does, and check that none of its processes remains."""
    if live.is_alive():
        live.process.send_signal(signal.SIGINT)
    live.process.wait(SLOW_S)
    all_gone(live.root)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Start one server of the attacked kind for all runs."""
    folder = tmp_path_factory.mktemp("site")
    with serving(folder, *KIND.options(), **KIND.model) as made:
        yield made


@pytest.fixture(scope="session")
def live(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Start the attacked run; test_end.py or this fixture stops it."""
    root = tmp_path_factory.mktemp("attacked")
    run = start(
        site,
        root,
        "launcher.rollout_workers=2",
        "launcher.trainer_ranks=2",
        f"datapipe.max_frame_mb={FRAME_MB}",
        "trainer.ppo.collector.concurrency=6",  # so that further workers get leases, too
        "trainer.ppo.checkpoint.every_steps=25",
    )
    try:
        yield run
    finally:
        stop(run)
