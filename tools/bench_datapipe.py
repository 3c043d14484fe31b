"""Measure the datapipe: trajectories per second from worker links to the durable ledger, the ledger
alone, the size of its log under load, and recovery with a large ledger.

The baselines of the same run are acknowledged messages over DEALER/ROUTER sockets, and SQLite
alone. Records are trajectories of 1,000 tokens.
Run: python tools/bench_datapipe.py [--repeats 3] [--kilobytes 64] [--records 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import pickle
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import zmq
from msgspec import structs

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.payloads import TOKEN_BYTES, Payload
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.task import Task
from arealite.api.trainer_messages import Finish, Published, StepReport
from arealite.api.trajectory import TrajectoryHeader
from arealite.system.data.dataset import identity
from arealite.system.ledger.group import Group
from arealite.system.ledger.ledger import Ledger, connect, read_payloads
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.links.worker_link import WorkerLink
from arealite.system.names.name_registry import NameRegistry
from tests.system.scenes import payload as make_payload
from tools import figures

RECORD_BYTES = TOKEN_BYTES * 1000
"""Bytes of a trajectory of 1,000 sampled tokens: token, logprob and version of each."""
OPEN = 1000
"""Number of trajectories of the large ledger that are not durable yet."""
GROUP, BATCH = 8, 64
"""Trajectories per group, and groups per batch, in the large ledger."""
Process = subprocess.Popen[bytes]
TASKS = [
    Task(task_id=f"train-{i}", prompt="x", ground_truth=None, extra_info={}) for i in range(1000)
]
SERVE = """
import asyncio, gc, pickle, sys
from pathlib import Path
from arealite.api.task import Task
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.health import vitals
from arealite.system.names.name_registry import NameRegistry
config = pickle.loads(Path(sys.argv[1]).read_bytes())
tasks = [
    Task(task_id=f"train-{i}", prompt="x", ground_truth=None, extra_info={}) for i in range(1000)
]
names = NameRegistry.of(config)
async def main():
    vitals.watch(asyncio.get_running_loop())
    await Datapipe(config=config, train=tasks, eval=[], registry=names).run()
gc.freeze()
asyncio.run(main())
"""


def settings(root: Path, count: int, *, security: bool = True) -> ExperimentConfig:
    """Return an experiment whose first batch holds all trajectories of the benchmark."""
    config = ExperimentConfig()
    ppo = replace(config.trainer.ppo, batch_size=count, max_staleness=0)
    where = {"run_root": str(root), "name_root": str(root / "names")}
    return replace(
        config,
        cluster=replace(config.cluster, **where, security=security),
        trainer=replace(config.trainer, ppo=ppo),
    )


def make_header(
    group_id: str, member: int, task_id: str = "train-0", tokens: int = 1000
) -> TrajectoryHeader:
    """Return a trajectory, by default of 1,000 tokens."""
    return TrajectoryHeader(
        trajectory_id=f"{group_id}/{member}/agent",
        group_id=group_id,
        member=member,
        seat="agent",
        task_id=task_id,
        reward=1.0,
        reward_parts={},
        segment_lengths=[tokens],
        trained_tokens=tokens - 100,
        oldest_version=0,
        newest_version=0,
        turns=1,
        truncated=False,
        interruptions=0,
        seconds=1.0,
        waits={"generation": 1.0},
    )


async def collect(names: NameRegistry, count: int, size: int) -> float:
    """Return results of leases at once; return the seconds until all are acknowledged."""
    find = partial(names.address, "datapipe")
    link = WorkerLink(resolve=find, worker_id="bench", capacity=512, secret=names.secret)
    payload = make_payload(make_header("g0", 0, tokens=size // TOKEN_BYTES))
    done = 0
    async with asyncio.TaskGroup() as group:
        group.create_task(link.run())
        begin = None
        while done < count:
            lease = await link.next_lease()
            begin = begin or time.perf_counter()
            for member in lease.members:
                header = make_header(
                    lease.group_id, member, lease.task.task_id, size // TOKEN_BYTES
                )
                header = structs.replace(header, digest=payload.digest)
                episode = Episode(
                    lease_id=lease.lease_id,
                    group_id=lease.group_id,
                    member=member,
                    headers=[header],
                    failure=None,
                )
                link.submit(episode, [payload])
                done += 1
        while link.unacknowledged:  # noqa: ASYNC110  (a clock, not a wait)
            await asyncio.sleep(0.0005)
        seconds = time.perf_counter() - begin
        link.drain()
    return seconds


@contextmanager
def serving(config: ExperimentConfig) -> Iterator[tuple[Process, float, NameRegistry]]:
    """Run a datapipe process; yield the process, its start time, and the folder of its name."""
    folder = run_paths(config).ledger.parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pickle").write_bytes(pickle.dumps(config))
    names = NameRegistry.of(config)
    begin = time.perf_counter()
    command = [sys.executable, "-c", SERVE, str(folder / "pickle")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while names.address("datapipe") is None:
        assert process.poll() is None, "the datapipe did not start"
        time.sleep(0.002)
    try:
        yield process, begin, names
    finally:
        process.kill()
        process.wait(20)
        names.remove("datapipe", "0")


def through_datapipe(
    folder: Path, count: int, size: int, *, security: bool = True
) -> tuple[float, float, float]:
    """Return trajectories per second, seconds from process start to the first reply, and CPU
    seconds of the datapipe per trajectory."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        config = settings(Path(name), count, security=security)
        with serving(config) as (process, begin, names):
            link = connect_trainer(names)
            link.start(0)
            ready = time.perf_counter() - begin
            link.report(Published(version=0))
            before = cpu_seconds(process)
            seconds = asyncio.run(collect(names, count, size))
            used = cpu_seconds(process) - before
            link.report(Finish(reason="bench over"))
            link.close()
            process.wait(20)
        return count / seconds, ready, used / count


def connect_trainer(names: NameRegistry) -> TrainerLink:
    """Return the link of a trainer of one rank."""
    find = partial(names.address, "datapipe")
    return TrainerLink(resolve=find, rank=0, world_size=1, secret=names.secret)


def cpu_seconds(process: Process) -> float:
    """Return the CPU seconds of a process."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


# ---------------------------------------------------------------- the ledger alone


def lease_one(seq: int) -> Group:
    """Return a group that one worker runs."""
    group = Group(
        seq=seq,
        group_id=f"g{seq}",
        task=TASKS[seq % 1000],
        size=GROUP,
        epoch=seq // 1000,
        row=seq % 1000,
    )
    version, members = seq // GROUP // BATCH, list(range(GROUP))
    lease = Lease(
        lease_id=f"{group.group_id}.1.1",
        group_id=group.group_id,
        split="train",
        task=group.task,
        members=members,
        version=version,
    )
    group.state, group.leases = "leased", {lease.lease_id: lease}
    group.owners = {lease.lease_id: "w"}
    return group


def fill(path: Path, count: int) -> dict[str, float]:
    """Write a trial of `count` trajectories; all but the last thousand are durable."""
    ledger = Ledger(path, fingerprint=identity(ExperimentConfig(), TASKS))
    groups: list[Group] = []
    payload = Payload(prompt=b"", turns=os.urandom(RECORD_BYTES))
    log = path.with_name(path.name + "-wal")
    commits, log_bytes = [], 0
    steps = (count - OPEN) // GROUP // BATCH
    begin = time.perf_counter()
    for seq in range(count // GROUP):
        group = lease_one(seq)
        groups.append(group)
        ledger.put_group(group)
        for member in range(GROUP):
            ledger.add_trajectory(make_header(group.group_id, member), payload)
        step, place = divmod(seq, BATCH)
        if seq % 3 or step < steps:  # every third open group lacks a member
            group.leases.clear()
            group.state = "complete"
        if place == BATCH - 1 and step < steps:
            for number, each in enumerate(groups):
                each.state, each.step, each.place = "batched", step, number
                ledger.put_group(each)
            said = [f"{g.group_id}/{member}/agent" for g in groups for member in range(GROUP)]
            groups.clear()
            ledger.train(StepReport(step=step, trained=said, metrics={"reward/mean": 0.5}))
        if step and place == BATCH - 1 and step % 20 == 0:
            ledger.checkpoint(min(step, steps), f"/checkpoints/{step}")
        began = time.perf_counter()
        ledger.commit()
        commits.append(time.perf_counter() - began)
        log_bytes = max(log_bytes, log.stat().st_size)
    ledger.checkpoint(steps, f"/checkpoints/{steps}")
    ledger.set_meta("version", str(steps))
    ledger.commit()
    seconds = time.perf_counter() - begin
    commits.sort()
    return {
        "ledger_per_s": count / seconds,
        "commit_p99_ms": commits[int(len(commits) * 0.99)] * 1e3,
        "commit_max_ms": commits[-1] * 1e3,
        "log_max_mb": log_bytes / 1e6,
    }


def _fill_and_die(path: Path, count: int, found) -> None:
    found.send(fill(path, count))
    found.close()
    os._exit(9)  # without cleanup: the log remains as after a kill


def _read_on(path: Path, done: threading.Event, hold_s: float) -> None:
    """Read payloads without a pause; every transaction is open for `hold_s`."""
    while not path.exists() and not done.wait(0.01):
        pass
    while not done.is_set():
        try:
            ids = [f"g{n}/0/agent" for n in range(16)]
            read_payloads(path, ids)
            with closing(connect(path, read_only=True)) as db:
                db.execute("BEGIN")
                db.execute("SELECT COUNT(*) FROM groups").fetchone()
                done.wait(hold_s)
        except Exception:  # noqa: BLE001  (the first rows are not there yet)
            continue


def in_child(path: Path, count: int) -> dict[str, float]:
    """Fill a ledger in a process that exits without cleanup."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_fill_and_die, args=(path, count, theirs))
    process.start()
    found = ours.recv()
    process.join()
    return found


def under_readers(folder: Path, count: int, hold_s: float) -> dict[str, float]:
    """Fill a ledger while four threads read it, each with transactions of `hold_s`."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path, done = Path(name) / "ledger.sqlite", threading.Event()
        readers = [threading.Thread(target=_read_on, args=(path, done, hold_s)) for _ in range(4)]
        for reader in readers:
            reader.start()
        found = in_child(path, count)
        done.set()
        for reader in readers:
            reader.join()
    return {f"read_{name}": value for name, value in found.items()}


def recovery(folder: Path, count: int, repeats: int) -> tuple[dict[str, float], list[float]]:
    """Return the seconds to fill a ledger, and from process start to a trainer's first reply."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        config = settings(Path(name), GROUP * BATCH)
        path = run_paths(config).ledger
        path.parent.mkdir(parents=True)
        found = in_child(path, count)
        found["ledger_gb"] = path.stat().st_size / 1e9
        seconds: list[float] = []
        for _ in range(repeats):
            with serving(config) as (_, begin, names):
                link = connect_trainer(names)
                link.start((count - OPEN) // GROUP // BATCH)
                seconds.append(time.perf_counter() - begin)
                link.close()
    return found, seconds


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
    """Return acknowledged messages per second between two processes, with 512 in flight."""
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
    """Return inserts per second in WAL mode, with 64 inserts per transaction."""
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
    parser.add_argument(
        "--records", type=int, default=100_000, help="trajectories of the large ledger"
    )
    parser.add_argument(
        "--hold", type=float, default=0.05, help="seconds of a reader's transaction"
    )
    options = parser.parse_args()
    folder, repeats = options.folder, options.repeats
    folder.mkdir(parents=True, exist_ok=True)
    count, size = options.count // 8 * 8, options.kilobytes * 1024
    rows: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            rows.setdefault(name, []).append(value)

    for _ in range(repeats):
        note(zmq_per_s=raw_zmq(count, size), sqlite_per_s=raw_sqlite(folder, count, size))
        rate, ready, cpu = through_datapipe(folder, count, size)
        note(datapipe_per_s=rate, ready_s=ready, cpu_us=cpu * 1e6)
        plain = through_datapipe(folder, count, size, security=False)[2]
        note(security_cpu_share=cpu / plain - 1)
        note(records_per_s=through_datapipe(folder, 4 * count, RECORD_BYTES)[0])
        note(**under_readers(folder, options.records // 4, options.hold))
    filled, rows["recovery_s"] = recovery(folder, options.records, repeats)
    note(**filled)
    metrics = {name: statistics.median(values) for name, values in rows.items()}
    metrics["share_of_zmq"] = metrics["datapipe_per_s"] / metrics["zmq_per_s"]
    metrics["share_of_sqlite"] = metrics["datapipe_per_s"] / metrics["sqlite_per_s"]
    metrics["kilobytes"] = float(options.kilobytes)
    for name, value in metrics.items():
        spread = f"  {[round(v, 2) for v in rows[name]]}" if name in rows else ""
        print(f"{name:<20}{value:>12.2f}{spread}")
    figures.save(folder / "datapipe.json", metrics)


if __name__ == "__main__":
    main()
