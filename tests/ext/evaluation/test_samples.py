"""Samples are durable once added, stored once each, and of one evaluation."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Episode, Failure
from arealite.base.errors import UserError
from arealite.ext.evaluation.samples import Samples
from tests.system.scenes import header

ROOT = Path(__file__).resolve().parents[3]
PAYLOAD = Payload(prompt=b"prompt", turns=b"turns")


@pytest.fixture
def samples(tmp_path: Path) -> Iterator[Samples]:
    made = Samples(tmp_path / "samples.sqlite")
    yield made
    made.close()


def done(task: int, member: int, *, reward: float = 1.0) -> tuple[Episode, list[Payload]]:
    made = header(f"eval-{task}", member, reward=reward)
    return Episode(
        lease_id="l", group_id=f"eval-{task}", member=member, headers=[made], failure=None
    ), [PAYLOAD]


async def test_samples_are_read_in_order_and_once_each(samples: Samples) -> None:
    keys = [(task, member) for task in (2, 0, 1) for member in (1, 0)]
    await asyncio.gather(*(samples.add(task, *done(task, member)) for task, member in keys))
    await samples.add(0, *done(0, 0, reward=0.0))
    assert samples.done() == {*keys}
    read = [(task, member, headers[0].reward) for task, member, headers in samples.headers()]
    assert read == [(task, member, 1.0) for task, member in sorted(keys)]
    assert samples.payloads(2, 1) == [PAYLOAD]


async def test_failures_are_counted_with_the_first_detail(samples: Samples) -> None:
    for kind, said in (("slow", "a"), ("slow", "b"), ("crash", "c")):
        await samples.fail(Failure(failure_class=kind, detail=said))
    assert samples.failures() == {"slow": (2, "a"), "crash": (1, "c")}


def test_samples_of_another_identity_are_refused(samples: Samples) -> None:
    samples.begin({"model": "a", "weights": "x" * 100})
    samples.begin({"model": "a", "weights": "x" * 100, "new": "key"})
    with pytest.raises(UserError, match=r"started with model=a, now it is b\. Restore it"):
        samples.begin({"model": "b"})
    with pytest.raises(UserError, match="started with another weights"):
        samples.begin({"model": "a", "weights": "y" * 100})


WRITER = """
import asyncio, sys
from pathlib import Path
from tests.ext.evaluation.test_samples import Samples, done
async def one(samples, member):
    await samples.add(0, *done(0, member))
    print(member, flush=True)
async def main(samples):
    for begin in range(0, 10**6, 8):
        await asyncio.gather(*(one(samples, begin + i) for i in range(8)))
asyncio.run(main(Samples(Path(sys.argv[1]))))
"""


def test_added_samples_survive_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "samples.sqlite"
    words = [sys.executable, "-c", WRITER, str(file)]
    told = list[int]()
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if not line.endswith("\n"):
                break
            told.append(int(line))
            if len(told) == 100:
                writer.kill()
    samples = Samples(file)
    kept = {member for _, member in samples.done()}
    samples.close()
    assert len(told) >= 100
    assert {*told} <= kept


def test_samples_of_an_older_version_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "samples.sqlite"
    first = Samples(file)
    first.begin({"model.path": "m"})
    first.begin({"model.path": "m"})
    first.close()
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("DELETE FROM meta WHERE key = 'format'")
    again = Samples(file)
    with pytest.raises(UserError, match="older version of AReaLite") as error:
        again.begin({"model.path": "m"})
    assert "\n" not in str(error.value)
    again.close()
