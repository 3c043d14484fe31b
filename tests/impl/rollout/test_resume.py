"""After a worker is killed in an episode, the next worker resumes from the last durable turn."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from arealite.api.collector_config import AgentConfig, CollectorConfig
from arealite.api.env import EnvConfig
from arealite.api.experiment_config import DatapipeConfig, ExperimentConfig, ModelConfig, run_paths
from arealite.api.llm import LLMClientConfig, SamplingConfig, ServersClientConfig
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trainer_messages import Finish, Published, StepReport
from arealite.api.trajectory import TrajectoryHeader
from arealite.api.trial import ClusterConfig
from arealite.api.turns import decode_turn
from arealite.base.config_tree import write
from arealite.ext.audit.audit import audit
from arealite.system.datapipe import workers as datapipe_workers
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.ledger.ledger import connect
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.experiment import PLAIN
from tests.fakes.sglang import FakeSGLang
from tests.models import tiny_model
from tests.payloads import decode_segments
from tests.system.scenes import in_thread, saved
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
BUDGET, CUT = 4, 2
"""Number of tokens of a complete turn and of the interrupted turn."""


def experiment(root: Path) -> ExperimentConfig:
    """Return a config with one group of one episode at a time, of three turns each."""
    collector = CollectorConfig(
        env=EnvConfig(type="counter"),
        agent=AgentConfig(math_code_single_step=PLAIN),
        client=LLMClientConfig(servers=ServersClientConfig(connect_timeout_s=60.0)),
        sampling=SamplingConfig(max_new_tokens=BUDGET),
        group_size=1,
        concurrency=1,
    )
    ppo = PPOConfig(collector=collector, batch_size=1, max_staleness=0)
    return ExperimentConfig(
        imports=["tests.impl.rollout.worlds"],
        cluster=ClusterConfig(run_root=str(root), name_root=str(root / "names"), ttl_s=600.0),
        model=ModelConfig(path=str(tiny_model(root / "model"))),
        datapipe=DatapipeConfig(lease_ttl_s=600.0),
        trainer=TrainerConfig(ppo=ppo),
    )


async def start(config: ExperimentConfig) -> asyncio.subprocess.Process:
    paths = run_paths(config)
    paths.root.mkdir(parents=True, exist_ok=True)
    write(config, paths.resolved)
    command = ["-m", "arealite.cli.main", "role", "rollout", "0", str(paths.root)]
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, env=ENVIRONMENT, stderr=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


def train(link: TrainerLink, config: ExperimentConfig) -> tuple[TrajectoryHeader, bytes]:
    link.start(0)
    link.report(Published(version=0))
    answer = link.next_batch(0)
    assert answer is not None
    batch, (payload,) = answer
    link.report(StepReport(step=0, trained=[batch.headers[0].trajectory_id], metrics={}))
    link.report(saved(config, 1))
    link.report(Finish(reason="done"))
    link.close()
    return batch.headers[0], payload


@pytest.mark.processes
async def test_turns_of_a_killed_worker_are_not_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datapipe_workers, "LEASE_ARRIVAL_S", 0.2)
    config = experiment(tmp_path)
    dice = random.Random(7)
    sampled: list[int] = []

    def next_token(_: list[int]) -> int:
        """Draw random tokens, so that a repeated sample differs; stop in the third turn."""
        sampled.append(dice.randrange(3, 60))
        if len(sampled) == 2 * BUDGET + CUT:
            server.hold_after = CUT
        return sampled[-1]

    server = FakeSGLang(next_token=next_token, vocab_size=64, version="0")
    names = NameRegistry.of(config, ttl_s=600.0)
    pipe = Datapipe(
        config=config,
        train=[Task(task_id="t0", prompt="ab", ground_truth=None, extra_info={})],
        eval=[],
        registry=names,
    )

    def kept() -> dict[int, int]:
        with closing(connect(pipe.machine.store.ledger.path, read_only=True)) as db:
            rows = db.execute("SELECT idx, payload FROM turns WHERE group_id = 'g0'").fetchall()
        return {index: len(decode_turn(blob).response.output_ids) for index, blob in rows}

    async with asyncio.timeout(280), server, asyncio.TaskGroup() as roles:
        names.put("llm_server", "fake", server.entry())
        piping = roles.create_task(pipe.run())
        await pipe.ready.wait()
        link = TrainerLink(resolve=lambda: pipe.address, rank=0, world_size=1, secret=names.secret)
        training = roles.create_task(in_thread(lambda: train(link, config)))
        first = await start(config)
        await server.held(1, seconds=240.0)
        server.hold_after = 0
        await (
            server.abort_all()
        )  # as a weight update does; the next request blocks before its first token
        await eventually(lambda: kept() == {0: BUDGET, 1: BUDGET, 2: CUT}, "turns did not come")
        first.send_signal(signal.SIGKILL)
        assert await first.wait() == -signal.SIGKILL
        before, asked = list(sampled), len(server.requests)
        assert len(before) == 2 * BUDGET + CUT
        server.release()
        second = await start(config)
        header, payload = await training
        await piping
        assert await second.wait() == 0
        later = [request.input_ids for request in server.requests[asked:]]

    (segment,) = decode_segments(payload)
    tokens = np.frombuffer(segment.tokens, "<i4")
    trained = tokens[np.frombuffer(segment.loss_mask, "u1") == 1].tolist()
    assert trained[: len(before)] == before, "what was durable is trained as it was sampled"
    assert len(trained) == header.trained_tokens == 3 * BUDGET
    assert (header.turns, header.reward) == (3, 1.5)
    assert header.interruptions == 2, "cut by the abort, then by the worker's death"
    logprobs = np.frombuffer(segment.logprobs, "<f4")[tokens.size - BUDGET :]
    assert logprobs.tolist() == [server.logprob(token) for token in trained[-BUDGET:]]
    assert later[0] == tokens[: tokens.size - (BUDGET - CUT)].tolist(), "it began at the cut"
    report = audit(run_paths(config).ledger)
    assert report.ok, report.table()
    assert report.failures_by_class == {"worker_lost": 1}
