"""Trajectories a second from worker links through a datapipe process into its durable ledger.

The ratios stand against two baselines of the same run: raw acknowledged DEALER/ROUTER, and SQLite
alone. Run: python tools/bench_datapipe.py [--repeats 3] [--kilobytes 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import zmq

from arealite.api.config import ExperimentConfig, name_dir
from arealite.api.rollout_messages import Episode
from arealite.api.trajectory import TrajectoryHeader
from arealite.system.name_registry import NameRegistry
from arealite.system.trainer_link import TrainerLink
from arealite.system.worker_link import WorkerLink

SERVE = """
import asyncio, pickle, sys, time
from pathlib import Path
from arealite.api.config import name_dir
from arealite.api.task import Task
from arealite.system.datapipe import Datapipe
from arealite.system.name_registry import NameRegistry
config = pickle.loads(Path(sys.argv[1]).read_bytes())
tasks = [Task(f"train-{i}", "x", None, {}) for i in range(1000)]
names = NameRegistry(name_dir(config))
asyncio.run(Datapipe(config, train=tasks, eval=[], registry=names).run())
"""


def settings(root: Path, count: int) -> ExperimentConfig:
    """An experiment whose first batch takes everything the benchmark makes."""
    config = ExperimentConfig()
    ppo = replace(config.trainer.ppo, batch_size=count, max_staleness=0)
    return replace(
        config,
        cluster=replace(config.cluster, run_root=str(root), name_root=str(root / "names")),
        trainer=replace(config.trainer, ppo=ppo),
    )


async def collect(resolve, count: int, size: int) -> float:
    """Answer leases as fast as they come; return seconds until all is acknowledged."""
    link = WorkerLink(resolve, worker_id="bench", capacity=512)
    payload = os.urandom(size)
    done = 0
    async with asyncio.TaskGroup() as group:
        group.create_task(link.run())
        begin = None
        while done < count:
            lease = await link.next_lease()
            begin = begin or time.perf_counter()
            for member in lease.members:
                key = f"{lease.group_id}/{member}/agent"
                header = TrajectoryHeader(
                    key, lease.group_id, member, "agent", lease.task.task_id, 1.0, {}, [4096], 4000,
                    0, 0, 1, False, 0, 1.0, {"generation": 1.0},
                )  # fmt: skip
                episode = Episode(lease.lease_id, lease.group_id, member, [header], None)
                link.submit(episode, [payload])
                done += 1
        while link.unacknowledged:  # noqa: ASYNC110  (a clock, not a wait)
            await asyncio.sleep(0.0005)
        seconds = time.perf_counter() - begin
        link.drain()
    return seconds


def through_datapipe(folder: Path, count: int, size: int) -> tuple[float, float]:
    """Return (trajectories a second, seconds from process start to answering)."""
    import pickle

    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name)
        config = settings(root, count)
        (root / "config").write_bytes(pickle.dumps(config))
        names = NameRegistry(name_dir(config))

        def resolve() -> str | None:
            entries = names.list("datapipe")
            return str(entries[0].value["address"]) if entries else None

        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-c", SERVE, str(root / "config")],
                                   stderr=subprocess.DEVNULL)  # fmt: skip
        while resolve() is None:
            time.sleep(0.002)
        link = TrainerLink(resolve, rank=0, world_size=1)
        link.start(0)
        ready = time.perf_counter() - begin
        link.published(0)
        seconds = asyncio.run(collect(resolve, count, size))
        link.finish("bench over")
        link.close()
        process.wait(20)
        return count / seconds, ready


def _echo(port_pipe, count: int) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port_pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    for _ in range(count):
        route, ack, _ = router.recv_multipart()
        router.send_multipart([route, ack])
    router.close()
    context.term()


def raw_zmq(count: int, size: int) -> float:
    """Acknowledged messages a second between two processes, 512 under way."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_echo, args=(theirs, count))
    process.start()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{ours.recv()}")
    payload = os.urandom(size)
    sent = 0
    begin = time.perf_counter()
    for received in range(count):
        while sent < count and sent - received < 512:
            dealer.send_multipart([b"%d" % sent, payload])
            sent += 1
        dealer.recv_multipart()
    rate = count / (time.perf_counter() - begin)
    dealer.close()
    context.term()
    process.join()
    return rate


def raw_sqlite(folder: Path, count: int, size: int) -> float:
    """Inserts a second, WAL, 64 a transaction."""
    payload = os.urandom(size)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        db = sqlite3.connect(Path(name) / "db", isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("CREATE TABLE t (id TEXT PRIMARY KEY, payload BLOB)")
        begin = time.perf_counter()
        for first in range(0, count, 64):
            db.execute("BEGIN")
            for index in range(first, min(count, first + 64)):
                db.execute("INSERT INTO t VALUES (?, ?)", (f"g{index}/0/agent", payload))
            db.execute("COMMIT")
        rate = count / (time.perf_counter() - begin)
        db.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--kilobytes", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    count, size = options.count // 8 * 8, options.kilobytes * 1024
    names = ("zmq_per_s", "sqlite_per_s", "datapipe_per_s", "ready_s")
    rows: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.repeats):
        rows["zmq_per_s"].append(raw_zmq(count, size))
        rows["sqlite_per_s"].append(raw_sqlite(options.folder, count, size))
        rate, ready = through_datapipe(options.folder, count, size)
        rows["datapipe_per_s"].append(rate)
        rows["ready_s"].append(ready)
    metrics = {name: statistics.median(values) for name, values in rows.items()}
    metrics["share_of_zmq"] = metrics["datapipe_per_s"] / metrics["zmq_per_s"]
    metrics["share_of_sqlite"] = metrics["datapipe_per_s"] / metrics["sqlite_per_s"]
    metrics["kilobytes"] = float(options.kilobytes)
    for name, value in metrics.items():
        spread = f"  {[round(v, 2) for v in rows[name]]}" if name in rows else ""
        print(f"{name:<18}{value:>12.2f}{spread}")
    (options.folder / "datapipe.json").write_text(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()
