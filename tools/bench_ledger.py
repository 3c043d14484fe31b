"""Measure a ledger of 1.8 million small trajectories: time to open it, time of the end of a run,
and speed of the audit of payloads.

The ledger's own writer writes the rows, and the audits after each checkpoint write their marks. A
second, smaller ledger has payloads of 64 KB.
Run: python tools/bench_ledger.py [--records 1800000] [--kilobytes 64] [--large 4000]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.payloads import TOKEN_BYTES, Payload
from arealite.api.task import Task
from arealite.api.trainer_messages import StepReport
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.ext.audit.audit import audit
from arealite.ext.view import report_rows, report_run
from arealite.system.data.dataset import Permutation, identity
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger.group import Group
from arealite.system.ledger.ledger import Ledger
from tests.payloads import encode_segments
from tools import figures

GROUP, BATCH, EVERY = 8, 64, 20
"""Trajectories per group, groups per batch, steps between checkpoints."""
TASKS = [
    Task(task_id=f"train-{i}", prompt="x", ground_truth=None, extra_info={}) for i in range(1000)
]


def segments(tokens: int, version: int) -> tuple[list[Segment], Payload]:
    """Return a trajectory of one segment; half of its tokens are sampled."""
    rng = np.random.default_rng(tokens)
    prompt = tokens // 2
    mask = np.arange(tokens) >= prompt
    ids = rng.integers(0, 150_000, tokens).astype("<i4")
    versions = np.where(mask, version, -1).astype("<i4")
    logprobs = (-rng.exponential(0.5, tokens) * mask).astype("<f4")
    rewards = np.zeros(tokens, "<f4")
    rewards[-1] = 1.0
    segment = Segment(
        tokens=ids.tobytes(),
        loss_mask=mask.astype("u1").tobytes(),
        logprobs=logprobs.tobytes(),
        versions=versions.tobytes(),
        rewards=rewards.tobytes(),
        temperature=1.0,
    )
    return [segment], encode_segments([segment])


def header(group: Group, member: int, tokens: int, version: int) -> TrajectoryHeader:
    name = f"{group.group_id}/{member}/agent"
    sampled = tokens - tokens // 2
    return TrajectoryHeader(
        trajectory_id=name,
        group_id=group.group_id,
        member=member,
        seat="agent",
        task_id=group.task.task_id,
        reward=1.0,
        reward_parts={"exact": 1.0},
        segment_lengths=[tokens],
        trained_tokens=sampled,
        oldest_version=version,
        newest_version=version,
        turns=1,
        truncated=False,
        interruptions=0,
        seconds=1.0,
        waits={"generation": 0.9, "reward": 0.1},
    )


def fill(path: Path, records: int, tokens: int) -> dict[str, float]:
    """Write a trial of `count` trajectories; the last steps are in no checkpoint."""
    ledger = Ledger(path, fingerprint=identity(ExperimentConfig(), TASKS))
    steps, audits, begin = records // GROUP // BATCH, list[float](), time.perf_counter()
    for step in range(steps):
        version = max(0, step - 1)
        _, payload = segments(tokens, version)
        groups = list[Group]()
        for place in range(BATCH):
            seq = step * BATCH + place
            group = Group(
                seq=seq,
                group_id=f"g{seq}",
                task=TASKS[seq % 1000],
                size=GROUP,
                epoch=seq // 1000,
                row=seq % 1000,
            )
            group.state, group.step, group.place = "batched", step, place
            ledger.put_group(group)
            groups.append(group)
            for member in range(GROUP):
                ledger.add_trajectory(header(group, member, tokens, version), payload)
        said = [f"{group.group_id}/{member}/agent" for group in groups for member in range(GROUP)]
        ledger.train(
            StepReport(
                step=step, trained=said, metrics={"reward/mean": 1.0}, ranks=1, fingerprint="ab"
            )
        )
        ledger.set_meta("version", str(step + 1))
        if step % EVERY == EVERY - 1 and step < steps - EVERY:
            ledger.checkpoint(step + 1, f"/checkpoints/{step + 1}")
            ledger.commit()
            began = time.perf_counter()
            report = audit(path, new_only=True)
            assert report.ok, report.table()
            audits.append(time.perf_counter() - began)
            ledger.set_meta("audited", report.mark)
        ledger.commit()
    seconds = time.perf_counter() - begin - sum(audits)
    ledger.close()
    return {
        "written_per_s": records / seconds,
        "audit_after_checkpoint_us_per_trajectory": 1e6 * sum(audits) / records,
    }


def settings(folder: Path) -> ExperimentConfig:
    config = ExperimentConfig()
    ppo = replace(config.trainer.ppo, batch_size=GROUP * BATCH, max_staleness=2)
    cluster = replace(config.cluster, run_root=str(folder), name_root=str(folder / "names"))
    return replace(config, cluster=cluster, trainer=replace(config.trainer, ppo=ppo))


def median(function: Callable[[], object], repeats: int) -> float:
    seconds = list[float]()
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def measure(folder: Path, records: int, tokens: int, repeats: int) -> dict[str, float]:
    config = settings(folder)
    paths = run_paths(config)
    paths.root.mkdir(parents=True)
    found = fill(paths.ledger, records, tokens)
    found["file_gb"] = paths.ledger.stat().st_size / 1e9
    payload = segments(tokens, 0)[1].size

    def opens() -> None:
        ledger = Ledger(paths.ledger, fingerprint=identity(ExperimentConfig(), TASKS))
        sampler = Permutation(len(TASKS), seed=1, shuffle=True)
        GroupStore(ledger, TASKS, ppo=config.trainer.ppo, sampler=sampler)
        ledger.close()

    def ends() -> None:
        report = audit(paths.ledger, new_only=True)
        assert report.ok, report.table()
        assert report.groups.offered == records // GROUP // BATCH * BATCH
        report.table()

    def audits() -> None:
        report = audit(paths.ledger)
        assert report.ok, report.table()

    found["open_s"] = median(opens, repeats)
    found["end_s"] = median(ends, repeats)
    seconds = median(audits, 1)
    found["audit_s"] = seconds
    found["audit_us_per_trajectory"] = 1e6 * seconds / records
    found["audit_payload_mb_per_s"] = records * payload / 1e6 / seconds
    found["report_ledger_s"] = median(lambda: report_run.read_ledger(paths.ledger), 1)
    found["report_rows_s"] = median(lambda: report_rows.choose(paths.ledger, 10_000), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_800_000)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a small trajectory")
    parser.add_argument("--kilobytes", type=int, default=64)
    parser.add_argument("--large", type=int, default=8_000, help="trajectories with large payloads")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    whole = GROUP * BATCH
    shapes = {
        "small": (options.records // whole * whole, options.tokens),
        "large": (options.large // whole * whole, options.kilobytes * 1024 // TOKEN_BYTES),
    }
    found = dict[str, float]()
    for name, (records, tokens) in shapes.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            made = measure(Path(folder), records, tokens, options.repeats)
        found |= {f"{name}_records": float(records)} | {f"{name}_{k}": v for k, v in made.items()}
        figures.show({k: v for k, v in found.items() if k.startswith(name)}, digits=3)
    figures.save(options.folder / "ledger.json", found)


if __name__ == "__main__":
    main()
