"""Measure the lag of the datapipe's event loop under 64 rollout workers that never wait.

All parts of AReaLite are real: the datapipe's process and its ledger, 64 rollout workers (in a few
processes; each worker has its own client and connection), and batches to a trainer's link. The
environment and the stub server reply at once, so that only AReaLite limits the speed.

    python tools/bench_workers.py [--workers 64] [--processes 2] [--steps 40]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_datapipe import connect_trainer, serving  # noqa: E402
from bench_rollout import experiment, stub  # noqa: E402

from arealite.api.experiment_config import ExperimentConfig  # noqa: E402
from arealite.api.trainer_messages import Finish, Published, StepReport  # noqa: E402
from arealite.base import log  # noqa: E402
from arealite.system.names.name_registry import NameRegistry  # noqa: E402
from tools import figures  # noqa: E402

LIMIT_MS = 50.0


def work(config: ExperimentConfig, first: int, count: int) -> None:
    """Run `count` rollout workers until the datapipe ends them."""
    import uvloop

    from arealite.impl.client.servers_client import ServersClient
    from arealite.impl.rollout.worker import RolloutWorker
    from arealite.system.links.worker_link import WorkerLink
    from tests.models import tiny_tokenizer

    collector, names, tokenizer = (
        config.trainer.ppo.collector,
        NameRegistry.of(config, ttl_s=3600.0),
        tiny_tokenizer(),
    )

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as tasks:
            for index in range(first, first + count):
                link = WorkerLink(
                    resolve=lambda: names.address("datapipe"),
                    worker_id=f"rollout-{index}",
                    capacity=collector.concurrency,
                    secret=names.secret,
                )
                client = ServersClient(config, collector.client)
                worker = RolloutWorker(config, link=link, client=client, tokenizer=tokenizer)
                tasks.create_task(worker.run(), name=f"worker {index}")

    log.setup("workers", "error")
    uvloop.run(all_of_them())


def train(config: ExperimentConfig, steps: int) -> dict[str, float]:
    """Take batches and report them trained; return rates and lags over all steps."""
    link = connect_trainer(NameRegistry.of(config, ttl_s=3600.0))
    link.start(0)
    link.report(Published(version=0))
    seconds, begin = [], time.perf_counter()
    for step in range(steps):
        answer = link.next_batch(step)
        assert answer is not None
        batch, _ = answer
        trained = [header.trajectory_id for header in batch.headers]
        link.report(StepReport(step=step, trained=trained, metrics={}, ranks=1, fingerprint=""))
        now = time.perf_counter()
        seconds.append(now - begin)
        begin, waits = now, batch.waits
    link.report(Finish(reason="bench over"))
    link.close()
    size = config.trainer.ppo.batch_size
    return {
        "trajectories_per_s": size / statistics.median(seconds[steps // 4 :]),
        "loop_lag_max_ms": 1e3 * waits["loop_lag_max_s"],
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run the workers against a datapipe; return the result of `train`."""
    with stub() as address, tempfile.TemporaryDirectory() as folder:
        config = experiment(folder, options.concurrency)
        ppo = replace(
            config.trainer.ppo,
            batch_size=options.batch_size,
            max_staleness=options.steps + 1,
            total_steps=options.steps,
        )
        cluster = replace(config.cluster, run_root=folder)
        config = replace(config, trainer=replace(config.trainer, ppo=ppo), cluster=cluster)
        entry = {"address": address, "vocab_size": 320, "context_length": 2048}
        NameRegistry.of(config).put("llm_server", "stub", entry)
        share = options.workers // options.processes
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=work, args=(config, index * share, share), daemon=True)
            for index in range(options.processes)
        ]
        with serving(config):
            for worker in workers:
                worker.start()
            found = train(config, options.steps)
            for worker in workers:
                worker.join(30)
                worker.kill()
    return found


def main() -> None:
    """Measure, print a table, and write out/bench/workers.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runs = [measure(options) for _ in range(options.repeats)]
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    found["loop_lag_worst_ms"] = max(run["loop_lag_max_ms"] for run in runs)
    print(f"{options.workers} workers in {options.processes} processes, {options.repeats} runs")
    figures.show(found)
    verdict = "under" if found["loop_lag_max_ms"] < LIMIT_MS else "NOT under"
    print(f"the datapipe's loop was {verdict} {LIMIT_MS:g} ms late (median of the runs' worst)")
    figures.save("workers.json", found | vars(options))


if __name__ == "__main__":
    main()
