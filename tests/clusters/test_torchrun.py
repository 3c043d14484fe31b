"""Runs under torchrun with two agents, one for each simulated node: the job continues after a
killed rank or a lost node with the remaining ranks."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.impl.engine import checkpoint
from tests.e2e import gated
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, all_gone, write_rows
from tests.models import tiny_model
from tests.waiting import until, until_exited

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

STEPS = 12


class Torchrun:
    """The agents of a job, and its run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, RunPaths(folder / "runs" / "e2e" / "torchrun")
        self.agents: list[subprocess.Popen[bytes]] = []
        self.gate, groups = folder / "gate", 4  # of a batch
        gated.write(self.gate, 4 * groups)
        model = tiny_model(folder / "model")
        write_rows(folder / "train.jsonl", 64, seed=1)
        self.words = [
            "experiment_name=e2e",
            "trial_name=torchrun",
            f"cluster.name_root={folder / 'names'}",
            f"cluster.run_root={folder / 'runs'}",
            f"model.path={model}",
            f"dataset.train={folder / 'train.jsonl'}",
            f"imports=[{gated.FILE}]",
            "trainer.ppo.collector.env.type=gated",
            f"trainer.ppo.collector.env.gated.gate={self.gate}",
            "trainer.ppo.batch_size=16",
            "trainer.ppo.collector.group_size=4",
            "trainer.ppo.collector.sampling.max_new_tokens=6",
            f"trainer.ppo.total_steps={STEPS}",
            "trainer.ppo.checkpoint.every_steps=2",
            "launcher.llm_servers=1",
            "logger.types=[]",
        ]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    @contextmanager
    def agent(self, nodes: str, *, hosts: bool) -> Iterator[subprocess.Popen[bytes]]:
        """Start an agent, as on one node.

        `hosts`: whether the rendezvous store is in its process. All agents here have the address of
        the endpoint, so without this option any agent may bind the port first.
        """
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
        command += ["--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=t", "--max-restarts=3"]
        command += [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--local-addr=127.0.0.1"]
        conf = "--rdzv-conf=join_timeout=400,read_timeout=400,last_call_timeout=2,close_timeout=5"
        conf += f",is_host={hosts}"
        command += [conf, str(ROOT / "train.py"), *self.words]
        log = (self.folder / f"agent-{len(self.agents)}.log").open("wb")
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=log,
            stderr=log,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        self.agents.append(process)
        try:
            yield process
        finally:
            family = (
                [*psutil.Process(process.pid).children(recursive=True)]
                if process.poll() is None
                else []
            )
            for each in [*family, process]:
                each.kill()
            process.wait(60)
            log.close()

    def ranks(self, agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
        return psutil.Process(agent.pid).children()

    def saved(self) -> int:
        return len(checkpoint.list_good(self.paths.checkpoints))

    def told(self) -> str:
        return "\n".join(log.read_text() for log in self.folder.glob("agent-*.log"))

    def assert_balanced(self) -> None:
        report = audit(self.paths.ledger)
        assert report.ok, report.table()
        assert report.steps == STEPS
        lines = [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]
        assert [line["step"] for line in lines if "reward/mean" in line] == list(
            range(1, STEPS + 1)
        )
        all_gone(self.folder)


@pytest.fixture
def job(tmp_path: Path) -> Torchrun:
    return Torchrun(tmp_path)


@pytest.mark.part
def test_killed_rank_restarts_the_job_on_both_nodes(job: Torchrun) -> None:
    with ExitStack() as agents:
        both = [agents.enter_context(job.agent("2", hosts=hosts)) for hosts in (True, False)]
        until(
            lambda: job.saved() or both[0].poll() is not None, what="a checkpoint", seconds=SLOW_S
        )
        victim = job.ranks(both[1])[0]
        victim.send_signal(signal.SIGKILL)
        job.gate.unlink()
        for agent in both:
            assert agent.wait(2 * SLOW_S) == 0, job.told()
    until_exited(victim)
    assert "resuming after step" in job.told()
    job.assert_balanced()


@pytest.mark.parametrize("order", ["the host first", "the host last"])
def test_job_continues_with_one_rank_after_a_lost_node(job: Torchrun, order: str) -> None:
    """The node without the rendezvous store is lost as a whole, whichever agent started first.

    torchrun numbers the nodes of one address by process id, so rank 0 is with the agent that
    started first: the remaining agent or the lost one.
    """
    with ExitStack() as agents:
        started = [
            agents.enter_context(job.agent("1:2", hosts=hosts))
            for hosts in ((True, False) if order == "the host first" else (False, True))
        ]
        kept, lost = started if order == "the host first" else reversed(started)
        until(lambda: job.saved() or kept.poll() is not None, what="a checkpoint", seconds=SLOW_S)
        members = [*psutil.Process(lost.pid).children(recursive=True), psutil.Process(lost.pid)]
        for each in members:
            each.kill()
        until_exited(*members)
        job.gate.unlink()
        assert kept.wait(2 * SLOW_S) == 0, job.told()
    facts = [
        json.loads((p / "manifest.json").read_text())
        for p in checkpoint.list_good(job.paths.checkpoints)
    ]
    assert facts[-1]["world_size"] == 1
    job.assert_balanced()
