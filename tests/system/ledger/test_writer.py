"""The writer commits at once after an idle interval, otherwise once per interval."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arealite.system.ledger.ledger import Ledger
from arealite.system.ledger.writer import LedgerWriter

INTERVAL_S = 0.05


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Records the number of statements of each transaction."""
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={})
    execute, ledger.written = ledger.execute, []  # type: ignore[attr-defined]

    def noted(statements: list[Any]) -> None:
        ledger.written.append(len(statements))  # type: ignore[attr-defined]
        execute(statements)

    ledger.execute = noted  # type: ignore[method-assign]
    yield ledger
    ledger.close()


def kept(ledger: Ledger, key: str) -> bool:
    sql = "SELECT 1 FROM meta WHERE key = ?"
    return ledger.connection.execute(sql, (key,)).fetchone() is not None


async def durable(writer: LedgerWriter, *, hurry: bool = False) -> None:
    """Wait until all queued writes are committed."""
    done = asyncio.Event()
    writer.after_commit(done.set, hurry=hurry)
    async with asyncio.timeout(60):
        await done.wait()


async def test_first_and_hurried_writes_are_committed_at_once(ledger: Ledger) -> None:
    writer = LedgerWriter(ledger, interval_s=600.0)
    running = asyncio.create_task(writer.run())
    ledger.set_meta("first", "1")
    await durable(writer)
    assert kept(ledger, "first")
    for key in ("second", "third"):
        ledger.set_meta(key, "1")
        await durable(writer, hurry=True)
        assert kept(ledger, key)
    ledger.set_meta("last", "1")
    writer.request_commit()
    writer.close()
    async with asyncio.timeout(60):
        await running
    assert kept(ledger, "last"), "the end does not wait, either"


async def test_under_load_transactions_are_an_interval_apart(ledger: Ledger) -> None:
    writer, told = LedgerWriter(ledger, interval_s=INTERVAL_S), list[tuple[str, bool]]()
    running = asyncio.create_task(writer.run())
    begin = time.monotonic()
    for number in range(100):
        ledger.set_meta(f"{number}", "1")
        writer.after_commit(lambda key=f"{number}": told.append((key, kept(ledger, key))))
        await asyncio.sleep(0.002)
    writer.close()
    await running
    seconds = time.monotonic() - begin
    assert len(ledger.written) <= seconds / INTERVAL_S + 2  # type: ignore[attr-defined]
    assert sum(ledger.written) == 100  # type: ignore[attr-defined]
    assert told == [(f"{n}", True) for n in range(100)], "each told in order, once it is durable"


async def test_no_transaction_without_writes(ledger: Ledger) -> None:
    ledger.take_busy_s()
    writer = LedgerWriter(ledger, interval_s=0.0)
    running = asyncio.create_task(writer.run())
    await durable(writer)
    await durable(writer)
    writer.close()
    await running
    assert ledger.written == []  # type: ignore[attr-defined]
    assert ledger.take_busy_s() == 0.0


async def test_queued_writes_are_committed_before_the_end(ledger: Ledger) -> None:
    writer = LedgerWriter(ledger, interval_s=INTERVAL_S)
    running = asyncio.create_task(writer.run())
    ledger.set_meta("quiet", "1")
    writer.request_commit()
    writer.close()
    await running
    assert kept(ledger, "quiet")
