"""A live run with two workers and two ranks, and what a stranger knows of it: its ports."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from arealite.base.names import RunPaths
from arealite.system.names.registry import NameRegistry
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site, all_gone, site
from tests.waiting import until

__all__ = ["site"]


@dataclass
class Live:
    """A run under way."""

    process: subprocess.Popen[str]
    paths: RunPaths
    datapipe: str
    """Its address, tcp://HOST:PORT."""
    server: str
    """URL of the language-model server."""
    names: Path
    """The trial's folder in the name registry."""

    def steps(self) -> int:
        """Return how many steps are in the metrics file."""
        file = self.paths.metrics
        return file.read_text().count('"update/grad_norm"') if file.exists() else 0


@pytest.fixture(scope="session")
def live(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Start the run, wait for its first step; at the end stop it as a user does."""
    root = tmp_path_factory.mktemp("attacked")
    more = ["launcher.rollout_workers=2", "launcher.trainer_ranks=2"]
    command = site.command(root, "trainer.ppo.total_steps=100000", *more)
    shown = (root / "shown.txt").open("w")
    process = subprocess.Popen(
        command, cwd=root, env=ENVIRONMENT, stdout=shown, stderr=subprocess.STDOUT, text=True
    )
    (names,) = [folder for folder in (site.folder / "names").glob("*/e2e/t")]
    registry = NameRegistry(names)
    find = lambda: registry.list("datapipe")  # noqa: E731
    until(lambda: find() or process.poll() is not None, what="a datapipe", seconds=SLOW_S)
    assert process.poll() is None, (root / "shown.txt").read_text()
    (server,) = registry.list("llm_server")
    datapipe, paths = str(find()[0].value["address"]), RunPaths(root / "e2e" / "t")
    made = Live(process, paths, datapipe, str(server.value["address"]), names)
    until(made.steps, what="the first step", seconds=SLOW_S)
    try:
        yield made
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(SLOW_S)
        shown.close()
        all_gone(root)
