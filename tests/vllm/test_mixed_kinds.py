"""One trial with a real vLLM, a real SGLang and an embedded server at the same time.

The tests need SGLang, too (`make sglang`), or the Python in SGLANG_PYTHON.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.system.names.name_registry import NameRegistry, read_secret
from tests.e2e.conftest import (
    ENVIRONMENT,
    LEARNING,
    SLOW_S,
    START_S,
    Finished,
    Site,
    all_gone,
    launched,
    serving,
)
from tests.real_servers import sglang_options, vllm_options
from tests.sglang.shared import call
from tests.waiting import until, until_exited

SERVED = Path(__file__).with_name("served.py")
"""The plugin is not imported here: it would change the client of other tests."""
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(START_S + 4 * SLOW_S)]

STEPS = 6
TOLERANCE = 1e-4
"""Largest difference of a log-probability, mean of a batch, in float32."""
MODEL = {"hidden_size": 64, "num_attention_heads": 2}
"""Heads of 32 numbers: vLLM has no smaller ones on a CPU."""
VERSION_PATHS = {"embedded": "/model_info", "sglang": "/model_info", "vllm": "/weight_info"}


@dataclass(kw_only=True)
class MixedSite:
    """A trial with a server of each kind."""

    site: Site

    @property
    def names(self) -> NameRegistry:
        (root,) = (self.site.folder / "names").glob("*/e2e/t")
        return NameRegistry(root=root, ttl_s=SLOW_S)

    @property
    def servers(self) -> dict[str, dict[str, Any]]:
        """Return the name entries of the servers by kind."""
        return {entry.value["type"]: entry.value for entry in self.names.list("llm_server")}

    def versions(self) -> dict[str, str]:
        """Return the version that each server reports, by kind."""
        secret = read_secret(self.names.root)
        assert secret is not None
        return {
            kind: call(entry["address"], VERSION_PATHS[kind], token=secret.token)[1][
                "weight_version"
            ]
            for kind, entry in self.servers.items()
        }

    def served_kinds(self, run_root: Path) -> Counter[str]:
        """Return the number of answers of each kind in a run."""
        kind_of_address = {entry["address"]: kind for kind, entry in self.servers.items()}
        addresses = (run_root / "served.txt").read_text().split()
        return Counter(kind_of_address[address] for address in addresses)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedSite]:
    """Start the three servers, at the same time: one after the other would take minutes."""
    folder = tmp_path_factory.mktemp("mixed")
    kinds = {"vllm": vllm_options(), "sglang": sglang_options()}
    with ExitStack() as stack:
        site = stack.enter_context(serving(folder, **MODEL))
        for kind, options in kinds.items():
            log = folder / f"{kind}.log"
            stack.enter_context(launched(folder, site.model, *options, log=log))
        mixed = MixedSite(site=site)
        are_there = lambda: {*mixed.servers} == {*VERSION_PATHS}  # noqa: E731
        logs = lambda: "\n".join((folder / f"{kind}.log").read_text() for kind in kinds)  # noqa: E731
        until(are_there, what=lambda: f"three servers\n{logs()}", seconds=START_S)
        yield mixed


def train_options(*options: str) -> list[str]:
    return [f"imports=[{SERVED}]", *LEARNING, *options]


@pytest.mark.parametrize("publisher", ["disk", "distributed"])
def test_each_kind_serves_and_confirms_every_version(
    mixed: MixedSite, tmp_path: Path, publisher: str
) -> None:
    environment = {"SERVED": str(tmp_path / "served.txt")}
    options = train_options(
        f"trainer.ppo.publisher.type={publisher}",
        f"trainer.ppo.total_steps={STEPS}",
        "trainer.ppo.max_staleness=1",
        "trainer.ppo.collector.concurrency=16",
    )
    run = mixed.site.train(tmp_path, *options, env=environment)
    assert run.code == 0, run.shown + run.logs()
    assert_good_run(run)
    published = [line for line in run.metrics() if "publish/servers" in line]
    assert len(published) == STEPS - 1  # the report of the last version is in no line
    assert {line["publish/servers"] for line in published} == {3.0}
    assert {line["publish/quarantined"] for line in published} == {0.0}
    assert mixed.versions() == dict.fromkeys(VERSION_PATHS, str(STEPS))
    num_answers = mixed.served_kinds(tmp_path)
    print(f"\n{publisher}: answers by kind {dict(num_answers)}")
    assert {*num_answers} == {*VERSION_PATHS}


def assert_good_run(run: Finished) -> None:
    """Check that the ledger is balanced and that no server had other weights than it reported."""
    report = audit(run.paths.ledger)
    assert report.ok, report.table()
    assert not report.lost and not report.repeated
    name = "mismatch/logprob_abs_diff_mean_current"
    differences = [line[name] for line in run.metrics() if name in line]
    print(f"\nlargest mean difference of log-probabilities: {max(differences, default=-1):.1e}")
    assert differences and max(differences) <= TOLERANCE


@dataclass(kw_only=True)
class LiveRun:
    """A run that trains until it is stopped."""

    process: subprocess.Popen[bytes]
    finished: Finished

    def metrics(self, name: str) -> list[float]:
        """Return a metric of all steps so far."""
        if not self.finished.paths.metrics.exists():
            return []
        lines = [json.loads(line) for line in complete_lines(self.finished.paths.metrics)]
        return [line[name] for line in lines if name in line]

    def wait_for_servers(self, number: int, *, steps: int) -> None:
        """Wait until this number of servers has confirmed each of the last steps."""

        def is_there() -> bool:
            numbers = self.metrics("publish/servers")[-steps:]
            return numbers == [number] * steps or self.process.poll() is not None

        text = lambda: f"{number} servers, not {self.metrics('publish/servers')}"  # noqa: E731
        until(is_there, what=text, seconds=START_S)
        assert self.process.poll() is None


def complete_lines(file: Path) -> list[str]:
    return file.read_text().split("\n")[:-1]


@contextmanager
def training(site: Site, run_root: Path) -> Iterator[LiveRun]:
    """Run train.py; stop it at the end as a user does."""
    command = site.command(run_root, *train_options("trainer.ppo.total_steps=100000"))
    shown = run_root / "shown.txt"
    with shown.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=run_root,
            env=ENVIRONMENT | {"SERVED": str(run_root / "served.txt")},
            stdout=output,
            stderr=output,
        )
    run = Finished(0, "", RunPaths(run_root / "e2e" / "t"))
    try:
        yield LiveRun(process=process, finished=run)
        process.send_signal(signal.SIGINT)
        process.wait(SLOW_S)
        assert process.returncode == 130, shown.read_text()
    finally:
        process.kill()
        process.wait()
    all_gone(run_root)


def test_run_continues_when_vllm_is_killed_and_takes_it_back(
    mixed: MixedSite, tmp_path: Path
) -> None:
    with training(mixed.site, tmp_path) as run:
        run.wait_for_servers(3, steps=2)
        killed = psutil.Process(mixed.servers["vllm"]["pid"])
        family = [killed, *killed.children(recursive=True)]
        killed.kill()
        until_exited(*family)
        run.wait_for_servers(2, steps=5)
        run.wait_for_servers(3, steps=5)
    assert_good_run(run.finished)
    assert mixed.servers["vllm"]["pid"] != killed.pid
    num_answers = mixed.served_kinds(tmp_path)
    print(f"\nanswers by kind {dict(num_answers)}")
    assert {*num_answers} == {*VERSION_PATHS}
