"""Names in a real etcd: they live by their lease, and an etcd that goes away is survived."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from arealite.api.config import ClusterConfig, ServerConfig
from arealite.base.errors import RoleError
from arealite.system.ledger.audit import audit
from arealite.system.names import etcd as name_etcd
from arealite.system.names.registry import NameRegistry
from tests.clusters.etcd import Etcd, etcd, needs_etcd
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site, strays, write_rows
from tests.models import tiny_model
from tests.waiting import eventually, until

pytestmark = [pytest.mark.cluster, needs_etcd, pytest.mark.timeout(300)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Etcd]:
    with etcd(tmp_path) as running:
        yield running


def names_in(addresses: str, *, ttl_s: float = 5.0, trial: str = "t") -> NameRegistry:
    cluster = ClusterConfig(name_store="etcd", etcd=addresses, ttl_s=ttl_s, user="u")
    return NameRegistry.of(ServerConfig(cluster=cluster, trial_name=trial))


def ids(names: NameRegistry, role: str = "llm_server") -> list[str]:
    return [entry.id for entry in names.list(role)]


def test_put_list_remove(server: Etcd) -> None:
    names = names_in(server.address)
    names.check()
    assert names.list("llm_server") == []
    names.put("llm_server", "b", {"address": "2"})
    names.put("llm_server", "a", {"address": "1"})
    names.put("llm_server", "a", {"address": "3"})
    names.put("llm_server_2", "c", {"address": "4"})
    found = [(entry.id, entry.value["address"]) for entry in names.list("llm_server")]
    assert found == [("a", "3"), ("b", "2")]
    assert names.address("llm_server") == "3" and names.address("datapipe") is None
    other = names_in(server.address, trial="other")
    assert ids(other) == []
    other.put("llm_server", "a", {})
    roots = [root for root, _ in names.everywhere("llm_server", "a")]
    assert [root.parts[-3:] for root in roots] == [
        ("u", "arealite", "other"),
        ("u", "arealite", "t"),
    ]
    names.remove("llm_server", "a")
    names.remove("llm_server", "a")
    assert ids(names) == ["b"] and ids(other) == ["a"]


def test_a_silent_name_is_dead_until_it_beats_again(server: Etcd) -> None:
    names = names_in(server.address, ttl_s=1.0)
    names.put("llm_server", "a", {})
    assert ids(names) == ["a"]
    until(lambda: not ids(names), what="the end of the lease")
    names.put("llm_server", "a", {})
    assert ids(names) == ["a"]


async def test_registered_outlives_an_etcd_that_forgets(server: Etcd) -> None:
    names, reader = names_in(server.address), names_in(server.address)
    async with names.registered("llm_server", "a", lambda: {"address": "x"}, heartbeat_s=0.05):
        assert ids(reader) == ["a"]
        await asyncio.to_thread(server.kill)
        assert ids(reader) == ["a"], "what was known"
        assert names_in(server.address).list("llm_server") == []
        await asyncio.to_thread(server.start, forgets=True)
        assert ids(reader) == ["a"], "what was known, until names have had time to come back"
        anew = names_in(server.address)
        await eventually(lambda: ids(anew), "the name")
    assert ids(anew) == []


def test_who_died_meanwhile_is_forgotten(server: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    names, clock = names_in(server.address), [0.0]
    monkeypatch.setattr(name_etcd.time, "monotonic", lambda: clock[0])
    names.put("llm_server", "a", {})
    assert ids(names) == ["a"]
    server.kill()
    assert ids(names) == ["a"]
    server.start(forgets=True)
    clock[0] = 4.9
    assert ids(names) == ["a"]
    clock[0] = 5.1
    assert ids(names) == []


async def test_a_name_is_held_as_soon_as_the_etcd_is_there(server: Etcd) -> None:
    names = names_in(server.address)
    server.kill()
    with pytest.raises(RoleError, match="no etcd answers"):
        names.put("llm_server", "a", {})
    async with names.registered("llm_server", "a", dict, heartbeat_s=0.05):
        assert ids(names) == []
        await asyncio.to_thread(server.start)
        await eventually(lambda: ids(names), "the name")


def test_the_next_address_is_asked(server: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as mute:  # takes connections, says nothing
        monkeypatch.setattr(name_etcd, "ANSWER_S", 0.2)
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        names = names_in(f"127.0.0.1:{mute.getsockname()[1]},{server.address}")
        names.put("llm_server", "a", {})
        mute.setblocking(False)
        asked = 0
        with suppress(BlockingIOError):
            while True:
                mute.accept()[0].close()
                asked += 1
        assert asked == 1, "who answered last is asked first"
    assert ids(names) == ["a"]


@pytest.mark.processes
def test_a_run_survives_an_etcd_that_is_killed(server: Etcd, tmp_path: Path) -> None:
    """With all it knew, in the middle, and the datapipe while it is away."""
    run = tmp_path / "runs"
    run.mkdir()
    write_rows(tmp_path / "train.jsonl", 64, seed=1)
    write_rows(tmp_path / "eval.jsonl", 8, seed=2)
    site = Site(tmp_path, tiny_model(tmp_path / "model"), None)  # type: ignore[arg-type]
    words = ["cluster.name_store=etcd", f"cluster.etcd={server.address}", "launcher.llm_servers=1"]
    words += [f"cluster.name_root={tmp_path / 'names'}", "trainer.ppo.total_steps=12"]
    metrics = run / "e2e" / "t" / "metrics.jsonl"
    shown = tmp_path / "shown"

    def steps() -> int:
        return metrics.read_text().count("reward/mean") if metrics.exists() else 0

    with shown.open("wb") as out:
        process = subprocess.Popen(
            site.command(run, *words), cwd=run, env=ENVIRONMENT, stdout=out, stderr=out
        )
        try:
            until(
                lambda: steps() >= 2 or process.poll() is not None, what="2 steps", seconds=SLOW_S
            )
            server.kill()
            begin = steps()
            until(lambda: steps() >= begin + 3, what="steps without an etcd", seconds=SLOW_S)
            (vitals,) = (tmp_path / "names").rglob("vitals/datapipe-0.json")
            os.kill(json.loads(vitals.read_text())["pid"], signal.SIGKILL)
            again = "datapipe-0 died (killed by SIGKILL); started again (1 of 5)"
            until(lambda: again in shown.read_text(), what=again)
            server.start(forgets=True)
            cluster = ClusterConfig(name_store="etcd", etcd=server.address)
            names = NameRegistry.of(
                ServerConfig(cluster=cluster, experiment_name="e2e", trial_name="t")
            )
            until(lambda: ids(names) and ids(names, "datapipe"), what="the names")
            assert process.wait(SLOW_S) == 0, shown.read_text()
        finally:
            process.kill()
            process.wait()
    report = audit(run / "e2e" / "t" / "ledger.sqlite")
    assert report.ok and report.steps == 12, report.table()
    assert shown.read_text().count("started again") == 1, shown.read_text()
    assert ids(names) == ids(names, "datapipe") == [], "a name was left"
    assert not list((tmp_path / "names").rglob("llm_server/*.json")), "a name in a file"
    assert not strays(run)
