"""Names appear, are renewed, and die without heartbeats."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from arealite.base.errors import DeadlineError, UserError
from arealite.system.names import name_registry
from arealite.system.names.name_registry import NameRegistry
from tests.waiting import eventually

TTL_S = 600.0
"""No name dies during a test, however slow the machine is."""


@pytest.fixture
def names(tmp_path: Path) -> NameRegistry:
    return NameRegistry(root=tmp_path, ttl_s=TTL_S)


def test_put_list_remove(names: NameRegistry, tmp_path: Path) -> None:
    assert names.list("llm_server") == []
    names.put("llm_server", "b", {"address": "2"})
    names.put("llm_server", "a", {"address": "1"})
    names.put("llm_server", "a", {"address": "3"})
    assert [(e.id, e.value["address"]) for e in names.list("llm_server")] == [
        ("a", "3"),
        ("b", "2"),
    ]
    names.remove("llm_server", "a")
    names.remove("llm_server", "a")
    assert [e.id for e in names.list("llm_server")] == ["b"]
    assert list((tmp_path / "llm_server").iterdir()) == [tmp_path / "llm_server" / "b.json"]


def test_name_without_heartbeat_is_dead_until_renewed(names: NameRegistry, tmp_path: Path) -> None:
    names.put("datapipe", "0", {})
    old = time.time() - TTL_S - 1.0
    os.utime(tmp_path / "datapipe" / "0.json", (old, old))
    assert names.list("datapipe") == []
    names.put("datapipe", "0", {})
    assert len(names.list("datapipe")) == 1


@pytest.mark.parametrize("apart_s", [-3600.0, 3600.0])
def test_wrong_clock_of_a_reader_changes_no_ages(
    names: NameRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart_s: float
) -> None:
    names.put("rollout", "live", {})
    names.put("rollout", "dead", {})
    old = time.time() - TTL_S - 1.0
    os.utime(tmp_path / "rollout" / "dead.json", (old, old))
    here = time.time
    monkeypatch.setattr(time, "time", lambda: here() + apart_s)
    assert [entry.id for entry in names.list("rollout")] == ["live"]
    names.put("rollout", "dead", {})
    assert [entry.id for entry in names.list("rollout")] == ["dead", "live"]
    assert len(list((tmp_path / "rollout").iterdir())) == 2, "folder_time left a file"


@pytest.mark.parametrize("apart_s", [-3600.0, 3600.0])
def test_wrong_clock_of_a_writer_changes_no_ages_after_the_second_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart_s: float
) -> None:
    names, clock, begin = NameRegistry(root=tmp_path, ttl_s=5.0), [1000.0], time.time()
    monkeypatch.setattr(name_registry.time, "monotonic", lambda: clock[0])

    def beat(at: float) -> None:
        clock[0] = 1000.0 + at
        names.put("rollout", "0", {})
        os.utime(tmp_path / "rollout" / "0.json", (begin + apart_s + at,) * 2)

    def lives(at: float) -> bool:
        clock[0] = 1000.0 + at
        return bool(names.list("rollout"))

    beat(0.0)
    assert lives(0.0) == (apart_s > 0), "the first reading trusts the modification time"
    beat(1.0)
    assert lives(1.0) and lives(5.9), "the file changed between two readings"
    assert not lives(6.1)
    beat(7.0)
    assert lives(7.0)


def test_after_a_long_time_without_readings_the_folders_clock_counts(
    names: NameRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(name_registry.time, "monotonic", lambda: clock[0])
    names.put("rollout", "0", {})
    assert names.list("rollout")
    died = time.time() - TTL_S - 1.0
    os.utime(tmp_path / "rollout" / "0.json", (died, died))
    clock[0] += TTL_S + 1.0
    assert not names.list("rollout"), "the file changed long ago"


def test_half_written_and_foreign_files_are_skipped(names: NameRegistry, tmp_path: Path) -> None:
    names.put("rollout", "0", {})
    (tmp_path / "rollout" / "1.json").write_text('{"addr')
    (tmp_path / "rollout" / "2.json").write_text("[1]")
    assert [e.id for e in names.list("rollout")] == ["0"]


def test_error_of_an_unwritable_root_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cluster\.name_root"):
        NameRegistry(root=tmp_path / "file").put("rollout", "0", {})


async def test_registered_renews_the_value_and_removes_the_name(names: NameRegistry) -> None:
    beats = asyncio.Queue[int]()
    count = 0

    def value() -> dict[str, int]:
        nonlocal count
        count += 1
        beats.put_nowait(count)
        return {"version": count}

    names.heartbeat_s = 0.01
    async with names.registered("llm_server", "0", value):
        assert names.list("llm_server")[0].value["version"] >= 1
        begun = count
        while await beats.get() < begun + 2:  # the value before this one is written then
            pass
        assert names.list("llm_server")[0].value["version"] > begun
    assert names.list("llm_server") == []


async def test_change_is_written_at_once(names: NameRegistry) -> None:
    value, changed = {"version": "1"}, asyncio.Event()
    names.heartbeat_s = 600.0
    async with names.registered("llm_server", "0", value.copy, changed=changed):
        value["version"] = "2"
        assert names.list("llm_server")[0].value == {"version": "1"}
        changed.set()
        await eventually(lambda: names.list("llm_server")[0].value == value, "the change")


async def test_name_without_a_value_is_not_renewed(names: NameRegistry) -> None:
    values: list[dict[str, Any] | None] = [{"version": "1"}]
    asked = asyncio.Queue[None]()

    def value() -> dict[str, Any] | None:
        asked.put_nowait(None)
        return values[-1]

    names.heartbeat_s = 0.01
    async with names.registered("llm_server", "0", value):
        file = names.root / "llm_server" / "0.json"
        values.append(None)
        for _ in range(3):
            await asked.get()
        written = file.stat().st_mtime_ns
        for _ in range(3):
            await asked.get()
        assert file.stat().st_mtime_ns == written
    assert not file.exists()


async def test_cancellation_during_the_first_write_leaves_no_name(
    names: NameRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, go_on = NameRegistry.put, threading.Event()

    def slow(registry: NameRegistry, *words: Any) -> None:
        put(registry, *words)
        go_on.wait(60)

    async def hold() -> None:
        async with names.registered("llm_server", "0", dict):
            pytest.fail("it was cancelled before that")

    monkeypatch.setattr(NameRegistry, "put", slow)
    holding = asyncio.create_task(hold())
    await eventually(lambda: names.list("llm_server"), "the name")
    holding.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert names.list("llm_server") == []


async def test_wait_returns_when_enough_names_exist(names: NameRegistry) -> None:
    names.put("llm_server", "0", {})
    waiting = asyncio.create_task(names.wait("llm_server", count=2, seconds=60.0, owner="me"))
    names.put("llm_server", "1", {})
    assert [e.id for e in await waiting] == ["0", "1"]


async def test_error_of_wait_names_the_missing_role(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"trainer waited .* for 1 live 'datapipe'"):
        await NameRegistry(root=tmp_path).wait("datapipe", seconds=0.05, owner="trainer")


def test_address_is_that_of_the_first_live_name(names: NameRegistry):
    assert names.address("datapipe") is None
    names.put("datapipe", "0", {"address": "tcp://127.0.0.1:1"})
    assert names.address("datapipe") == "tcp://127.0.0.1:1"
