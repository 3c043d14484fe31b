"""A session with a ledger: each sample once, each step once, whatever ends the session."""

from __future__ import annotations

import sqlite3
from collections import Counter
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import arealite
from arealite.api.engine import LossInput, Sequence
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base.errors import InvariantError, UserError
from arealite.ext.audit.audit import audit
from arealite.ext.session import engine_rank
from arealite.system.ledger.ledger import Ledger, decode_header, read_payloads
from tests.ext.session.conftest import Open

PROMPTS = ["2+3=", [5, 6, 7, 8]]
LR = 0.1


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "runs/arealite/trial/ledger.sqlite"


def query(ledger: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(ledger)) as db:
        return db.execute(sql).fetchall()


def states(ledger: Path) -> Counter[str]:
    """Return the number of samples by state, or by reason if they are filtered."""
    rows = query(ledger, "SELECT IFNULL(reason, state), COUNT(*) FROM groups GROUP BY 1")
    return Counter(dict(rows))


def audited(ledger: Path) -> Counter[str]:
    """Return `states` of a ledger that passes its audit."""
    report = audit(ledger)
    assert report.ok, report.table()
    return states(ledger)


async def rows_of(session: arealite.Session, n: int = 4) -> list[Sequence]:
    samples = await session.sample("2+3=", n=n, max_tokens=6)
    return session.rows(samples, [float(index % 2) for index in range(n)])


async def train(session: arealite.Session, rows: list[Sequence], **options: Any) -> None:
    session.forward_backward(rows, **options)
    await session.optim_step(lr=LR)


def fingerprint(session: arealite.Session) -> str:
    return session._policy.engine.fingerprint()


# ------------------------------------------------------------ samples


async def test_sample_is_in_the_ledger_when_it_is_returned(opened: Open, ledger: Path) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        samples = await session.sample(PROMPTS, n=3, max_tokens=6, temperature=0.8)
        unrecorded = await session.sample(PROMPTS, max_tokens=2, is_trained_on=False)
        ids = [sample.trajectory_id for sample in samples]
        payloads = read_payloads(ledger, ids)
        assert states(ledger) == {"complete": 6}
    assert ids == [f"g{number}/0/agent" for number in range(6)]
    assert [sample.trajectory_id for sample in unrecorded] == ["", ""]
    for sample, payload in zip(samples, payloads, strict=True):
        (segment,) = TrajectoryTree.decode(payload).segments()
        row = sample.row()
        assert np.frombuffer(segment.tokens, "<i4").tolist() == row.tokens.tolist()
        assert np.frombuffer(segment.loss_mask, np.uint8).tolist() == row.loss_mask.tolist()
        assert np.frombuffer(segment.logprobs, "<f4").tobytes() == (
            row.fields["behav_logprobs"].tobytes()
        )
        versions_T = np.frombuffer(segment.versions, "<i4")
        assert versions_T.tolist() == row.fields["versions"].tolist()
        assert segment.temperature == 0.8
    headers = [decode_header(raw) for (raw,) in query(ledger, "SELECT header FROM trajectories")]
    assert [header.task_id for header in headers] == [sample.group for sample in samples]
    assert {header.reward for header in headers} == {None}


async def test_sample_that_was_not_trained_is_dropped_at_the_end(
    opened: Open, ledger: Path
) -> None:
    async with opened(ledger=True) as parts:
        rows = await rows_of(parts.session, n=6)
        await train(parts.session, rows[:2])
        await parts.session.save("end")
    assert audited(ledger) == {"durable": 2, "dropped": 4}


async def test_sample_that_became_too_old_is_filtered(opened: Open, ledger: Path) -> None:
    async with opened(ledger=True, max_staleness=0) as parts:
        session = parts.session
        rows = await rows_of(session, n=5)
        await train(session, rows[:2])
        await session.forward_backward(rows[2:3])
        await session.publish()
        assert audited(ledger) == {"trained": 2, "stale": 3}
        with pytest.raises(UserError, match=r"the gradient is of the sample g2/0/agent, .*: stale"):
            await session.optim_step(lr=LR)
    assert audited(ledger) == {"trained": 2, "stale": 3}


async def test_failed_start_raises_its_own_error(
    opened: Open, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room for the model")

    with monkeypatch.context() as broken:
        broken.setattr(engine_rank, "make_engine", fail)
        with pytest.raises(MemoryError, match="no room for the model"):
            async with opened(ledger=True):
                pass
    async with opened(ledger=True) as parts:
        await train(parts.session, await rows_of(parts.session))
    assert audited(ledger) == {"trained": 4}


# ------------------------------------------------------------ steps


async def test_step_has_all_updates_up_to_the_publish(opened: Open, ledger: Path) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        rows = await rows_of(session, n=4)
        for epoch_rows in (rows[:2], rows[2:], rows):
            await train(session, epoch_rows, loss="ppo")
        assert query(ledger, "SELECT * FROM steps") == []
        await session.publish()
        steps = query(ledger, "SELECT step, trained, fingerprint FROM steps")
        assert steps == [
            (0, '["g0/0/agent", "g1/0/agent", "g2/0/agent", "g3/0/agent"]', fingerprint(session))
        ]
        await train(session, await rows_of(session, n=2), loss="ppo")
    assert query(ledger, "SELECT step, json_array_length(trained) FROM steps") == [(0, 4), (1, 2)]
    assert audited(ledger) == {"trained": 6}
    metrics = (ledger.parent / "metrics.jsonl").read_text().splitlines()
    lines = [msgspec.json.decode(line) for line in metrics]
    assert [(line["step"], line["reward/mean"]) for line in lines] == [(1, 0.5), (2, 0.5)]


async def test_sample_of_an_ended_step_is_refused(opened: Open, ledger: Path) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        rows = await rows_of(session)
        await train(session, rows)
        await session.publish()
        before = fingerprint(session)
        with pytest.raises(UserError, match=r"row 0 is of the sample g0/0/agent, which step 1 has"):
            await session.forward_backward(rows)
        later = await rows_of(session)
        with pytest.raises(UserError, match=r"row 4 is of the sample g3/0/agent, which step 1 has"):
            await session.forward_backward(later + rows[3:])
        with pytest.raises(UserError, match="there is no gradient"):
            await session.optim_step()
        assert fingerprint(session) == before
        await train(session, later)
    assert audited(ledger) == {"trained": 8}


async def test_gradient_of_a_sample_is_refused_after_the_end_of_its_step(
    opened: Open, ledger: Path
) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        rows = await rows_of(session)
        await train(session, rows)
        await session.forward_backward(rows)
        await session.publish()
        before = fingerprint(session)
        with pytest.raises(UserError, match="optim_step: the gradient is of the sample g0/0/agent"):
            await session.optim_step(lr=LR)
        assert fingerprint(session) == before
    assert audited(ledger) == {"trained": 4}


async def test_row_without_a_recorded_sample_is_refused(opened: Open, ledger: Path) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        (sample, *_) = await session.sample("2+3=", max_tokens=4)
        (unrecorded,) = await session.sample("2+3=", max_tokens=4, is_trained_on=False)
        row = sample.row()
        row_without_sample = Sequence(
            tokens=row.tokens, loss_mask=row.loss_mask, temperature=1.0, fields=row.fields
        )
        changed = sample.row()
        changed.tokens = changed.tokens[:-1]
        for wrong, problem in (
            (row_without_sample, "row 0 is of no sample in the ledger"),
            (unrecorded.row(), "row 0 is of no sample in the ledger"),
            (changed, "row 0 has other tokens than its sample g0/0/agent"),
        ):
            with pytest.raises(UserError, match=problem):
                await session.forward_backward([wrong])
    assert audited(ledger) == {"dropped": 1}


async def test_failed_call_trains_no_sample(opened: Open, ledger: Path) -> None:
    def fail(batch: LossInput) -> Any:
        raise ZeroDivisionError("no loss")

    async with opened(ledger=True) as parts:
        session = parts.session
        rows = await rows_of(session)
        await session.forward_backward(rows[:2])
        with pytest.raises(ZeroDivisionError):
            await session.forward_backward(rows[2:], fail)
        await session.drop_gradient()
        await train(session, rows[1:2])
        await session.publish()
    assert audited(ledger) == {"trained": 1, "dropped": 3}


async def test_refused_save_ends_no_step(opened: Open, ledger: Path) -> None:
    def fail(batch: LossInput) -> Any:
        raise ZeroDivisionError("no loss")

    async with opened(ledger=True) as parts:
        session = parts.session
        rows = await rows_of(session)
        await train(session, rows[:2])
        failing = session.forward_backward(rows[2:], fail)
        wait([failing._future])
        with pytest.raises(ZeroDivisionError):
            session.save("state")
        await train(session, rows[2:])
        await session.publish()
        assert session.version == 1
    assert audited(ledger) == {"trained": 4}


async def test_metrics_are_without_dropped_calls(opened: Open, ledger: Path) -> None:
    def of(value: float) -> Any:
        def loss(batch: LossInput) -> Any:
            loss = batch.outputs["logprobs"].sum()
            return loss, {"mine": torch.tensor(value)}

        return loss

    async with opened(ledger=True) as parts:
        session = parts.session
        rows = await rows_of(session)
        await session.forward_backward(rows, of(5.0))
        await session.drop_gradient()
        await train(session, rows, loss=of(1.0))
        await session.forward_backward(rows, of(7.0))
    (line,) = (ledger.parent / "metrics.jsonl").read_text().splitlines()
    assert msgspec.json.decode(line)["update/mine"] == 1.0


async def test_save_ends_a_step_and_the_age_of_later_samples_stays_right(
    opened: Open, ledger: Path
) -> None:
    async with opened(ledger=True, max_staleness=0) as parts:
        session = parts.session
        rows = await rows_of(session)
        await train(session, rows[:2])
        await session.save("middle")
        assert states(ledger) == {"durable": 2, "stale": 2}
        with pytest.raises(UserError, match=r"version 0, and the weights have version 1"):
            await session.forward_backward(rows[2:])
        await session.publish()
        assert session.version == 1
        for version in (2, 3):
            await train(session, await rows_of(session))
            await session.publish()
            assert session.version == version
    assert query(ledger, "SELECT step FROM steps") == [(0,), (1,), (2,)]
    assert audited(ledger)["trained"] == 8


def fill_the_disk(*_: object) -> None:
    """Stands in for each write."""
    raise InvariantError("the disk is full")


async def test_failed_write_loses_neither_samples_nor_steps(
    opened: Open, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        rows = await rows_of(session)
        with monkeypatch.context() as broken:
            broken.setattr(Ledger, "execute", fill_the_disk)
            with pytest.raises(InvariantError, match="the disk is full"):
                await session.sample(PROMPTS, n=2, max_tokens=4)
            await train(session, rows)
            with pytest.raises(InvariantError, match="the disk is full"):
                await session.save("state")
        assert audited(ledger) == {"complete": 4}
        samples = await session.sample(PROMPTS, n=2, max_tokens=4)
        assert samples[0].trajectory_id == "g4/0/agent"
        await session.save("state")
    assert audited(ledger) == {"durable": 4, "dropped": 4}


# ------------------------------------------------------------ states


async def test_load_rolls_the_ledger_back(opened: Open, ledger: Path) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        first = await rows_of(session)
        await train(session, first)
        await session.publish()
        await session.save("good")
        good = fingerprint(session)
        second = await rows_of(session)
        await train(session, second)
        await session.publish()
        await session.save("bad")
        await session.load("good")
        assert fingerprint(session) == good
        assert query(ledger, "SELECT step FROM steps") == [(0,)]
        assert states(ledger) == {"durable": 4, "complete": 4}
        with pytest.raises(UserError, match="which step 1 has trained"):
            await session.forward_backward(first)
        with pytest.raises(UserError, match=r"does not have the steps of the state .*bad"):
            await session.load("bad")
        with pytest.raises(UserError, match="does not exist"):
            await session.load("missing")
        assert fingerprint(session) == good
        await train(session, second[:3])
        await session.publish()
    assert query(ledger, "SELECT step FROM steps") == [(0,), (2,)]
    assert audited(ledger) == {"durable": 4, "trained": 3, "dropped": 1}


async def test_failed_roll_back_is_made_up_for(
    opened: Open, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        for name in ("good", "bad"):
            await train(session, await rows_of(session))
            await session.publish()
            await session.save(name)
        with monkeypatch.context() as broken:
            broken.setattr(Ledger, "execute", fill_the_disk)
            with pytest.raises(InvariantError, match="the disk is full"):
                await session.load("good")
        await train(session, await rows_of(session))
        await session.save("better")
    for table in ("steps", "session_steps"):
        assert query(ledger, f"SELECT step FROM {table}") == [(0,), (2,)]
    assert audited(ledger) == {"durable": 8, "dropped": 4}


async def test_later_session_continues_at_the_newest_state(opened: Open, ledger: Path) -> None:
    async with opened(ledger=True) as parts:
        session = parts.session
        for _ in range(2):
            await train(session, await rows_of(session))
            await session.publish()
        await session.save("state")
        saved = fingerprint(session)
        await train(session, await rows_of(session))
        await session.publish()
        lost = await rows_of(session)
    assert audited(ledger) == {"durable": 8, "trained": 4, "dropped": 4}
    async with opened(ledger=True) as parts:
        session = parts.session
        assert fingerprint(session) == saved
        assert session.version == 2
        assert states(ledger) == {"durable": 8, "rolled back": 4, "dropped": 4}
        with pytest.raises(UserError, match="g12/0/agent, which is filtered: dropped"):
            await session.forward_backward(lost)
        samples = await session.sample("2+3=", n=2, max_tokens=4)
        assert {version for sample in samples for version in sample.versions} == {2}
        assert samples[0].group == "group-4"
        await train(session, session.rows(samples, [0.0, 1.0]))
        await session.publish()
    assert query(ledger, "SELECT step FROM steps") == [(0,), (1,), (2,)]
    assert audited(ledger) == {"durable": 8, "rolled back": 4, "dropped": 4, "trained": 2}
    assert len((ledger.parent / "metrics.jsonl").read_text().splitlines()) == 3


async def test_later_session_continues_at_a_state_in_another_folder(
    opened: Open, ledger: Path, tmp_path: Path
) -> None:
    other_folder = tmp_path / "states/good"
    async with opened(ledger=True) as parts:
        session = parts.session
        await session.save("start")
        await train(session, await rows_of(session))
        for _ in range(3):  # its version is beyond the steps
            await session.publish()
        await session.save(other_folder)
        saved = fingerprint(session)
    for _ in range(2):
        async with opened(ledger=True) as parts:
            assert fingerprint(parts.session) == saved
            assert parts.session.version == 3
            assert audited(ledger) == {"durable": 4}
    rmtree(other_folder)
    async with opened(ledger=True) as parts:
        assert parts.session.version == 0
        assert audited(ledger) == {"rolled back": 4}


async def test_audit_passes_whatever_the_states_are_named(opened: Open, ledger: Path) -> None:
    async with opened(ledger=True) as parts:
        await train(parts.session, await rows_of(parts.session))
        for name in ("step-000010", "step-10", "step-b2"):
            await parts.session.save(name)
    assert audited(ledger) == {"durable": 4}


async def test_session_beside_a_ledger_and_adapters_with_one_are_refused(
    opened: Open, model: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="no adapters by name"):
        arealite.session(model, ledger=True, adapters=["a"])
    async with opened(ledger=True) as parts:
        with pytest.raises(UserError, match="add_adapter: a ledger has the steps of one set"):
            parts.session.add_adapter("a")
        with pytest.raises(UserError, match="serve: a ledger has the steps of one set"):
            parts.session.serve("a", model)
    with pytest.raises(UserError, match="trial 'trial' has a ledger"):
        await arealite.session(model, trial="trial", overrides=options)
