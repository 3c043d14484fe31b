"""Publish to scripted servers: staging before the pause, quarantine, republishing."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from safetensors.torch import load_file

from arealite.api.experiment_config import run_paths
from arealite.api.llm import SamplingConfig
from arealite.api.publisher import DiskPublisherConfig
from arealite.api.server_protocol import (
    GenerateRequest,
    ServerProtocol,
    VersionSpan,
    part_of_entry,
)
from arealite.base.errors import RoleError
from arealite.base.trial_files import TMPFS
from arealite.impl.engine import hf_folder
from arealite.impl.publisher import servers as base
from arealite.impl.publisher.control import ServerControl
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.publisher.servers import ServersPublisher
from tests.impl.publisher.sites import Site, paths, publishing, servers, tensors
from tests.waiting import eventually


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_two_servers_are_updated_and_continued(site: Site) -> None:
    async with servers(site, 2) as (first, second):
        report = await site.publish(7, 2.0)
        for server in (first, second):
            assert (server.version, server.paused) == ("7", None)
        assert (report.servers, report.quarantined, report.num_bytes) == (2, [], 44)
        assert 0 < report.load_s <= report.stall_s
        folder = site.newest_folder()
        assert names_in(folder) == [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert load_file(folder / "model.safetensors")["a.weight"].tolist() == [[2.0] * 3] * 2
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


async def test_only_the_newest_version_stays_staged_until_close(site: Site) -> None:
    async with servers(site, 1):
        for version in range(4):
            await site.publish(version)
            assert site.versions() == [f"v{version}"]
        assert site.publisher is not None
        await asyncio.to_thread(site.publisher.close)
        assert list(site.staged.iterdir()) == []


async def test_large_weights_are_staged_as_shards_with_an_index(site: Site) -> None:
    async with servers(site, 1):
        await site.publish(1, bucket_mb=0)
        folder = site.newest_folder()
        names = [name for name in names_in(folder) if name.startswith("model")]
        assert names == [
            "model-00001.safetensors",
            "model-00002.safetensors",
            "model.safetensors.index.json",
        ]
        assert set(load_file(folder / names[1])) == {"b.weight"}


async def test_server_that_dies_during_an_update_is_quarantined_and_updated_after_its_restart(
    site: Site,
) -> None:
    async with servers(site, 2) as (good, bad):
        bad.fail_next("die", path=bad.load_path)
        report = await site.publish(1)
        assert (report.servers, report.quarantined, good.version) == (1, ["s1"], "1")
        report = await site.publish(2)
        assert (report.servers, report.quarantined) == (1, ["s1"])
        await bad.restart()
        await eventually(lambda: bad.version == "2" and "s1" not in site.quarantined())
        assert bad.paused is None
        report = await site.publish(3)
        assert (report.servers, report.quarantined, bad.version) == (2, [], "3")


async def test_hanging_server_is_quarantined_and_updated_later(site: Site) -> None:
    async with servers(site, 2) as (good, slow):
        slow.fail_next("hang", path=slow.load_path, count=1000)
        report = await site.publish(1)
        assert (report.servers, report.quarantined, good.version) == (1, ["s1"], "1")
        assert 50.0 < (site.expirer.expired[0] or 0.0) <= 60.0, "publisher.timeout_s"
        slow.recover()
        await eventually(lambda: slow.version == "1" and slow.paused is None)


async def test_closing_during_a_push_leaves_no_server_paused(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(0)
        server.on_hang = lambda: None
        server.fail_next("hang", path=server.first_load_path)
        pushing = asyncio.ensure_future(site.publish(1))
        await eventually(lambda: server.paused is not None)
        assert site.publisher is not None
        await asyncio.to_thread(site.publisher.close)
        assert server.paused is None
        with pytest.raises((RoleError, asyncio.CancelledError)):
            await pushing


async def test_closed_publisher_refuses_a_push(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(0)
        assert site.publisher is not None
        await asyncio.to_thread(site.publisher.close)
        with pytest.raises(RoleError, match="closed before version 1 was pushed"):
            await site.publish(1)
        assert server.version == "0"


async def test_server_that_joins_late_is_updated(site: Site) -> None:
    async with servers(site, 1), site.server_kind() as late:
        await site.publish(4)
        assert late.version == "default"
        site.register(late, "late")
        await eventually(lambda: late.version == "4" and late.paused is None)


async def test_next_version_that_is_staged_during_an_update_is_not_loaded_by_it(
    site: Site,
) -> None:
    async with servers(site, 1), site.server_kind() as late:
        await site.publish(1)
        plain = late.pause
        goes_on = asyncio.Event()

        async def pause(mode: str) -> None:
            await plain(mode)
            await goes_on.wait()

        late.pause = pause
        site.register(late, "late")
        await eventually(lambda: late.paused is not None, "a pause")
        assert site.publisher is not None
        await asyncio.to_thread(site.publisher.stage, 2, iter(tensors(2.0).items()))
        goes_on.set()
        await eventually(lambda: late.load_path in paths(late), "an update")
        body = next(body for path, body in late.calls if path == late.load_path)
        assert str(site.folder_of(1)) in str(body)
        await eventually(lambda: late.version == "2" and late.paused is None, "both updates")


async def test_server_with_a_changed_version_is_updated_again(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(4)
        server.version = "default"
        await eventually(lambda: server.version == "4")


async def test_server_that_a_dead_publisher_left_paused_is_updated_and_continued(
    site: Site,
) -> None:
    async with servers(site, 1) as (server,):
        server.paused = "retract"
        await site.publish(1)
        assert (server.version, server.paused) == ("1", None)


async def test_initial_version_is_loaded_even_if_the_server_reports_its_number(
    site: Site,
) -> None:
    async with servers(site, 1) as (server,):
        server.version = "0"
        await site.publish(0)
        assert server.load_path in paths(server)


async def test_publish_fails_if_no_server_confirms(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.fail_next("500", count=1000, path=server.first_load_path)
        said = rf"no server confirmed version 1 .*s0 at {server.url}.*500"
        await site.refused(1, site.quarantined, said)
        assert site.publisher is not None
        await asyncio.to_thread(site.publisher.close)  # otherwise a republish may be in progress
        assert server.paused is None


async def test_publish_fails_if_no_server_is_registered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "SERVER_START_S", 0.1)
    with pytest.raises(RoleError, match=r"in 0.1 s .* None is registered"):
        await site.publish(1)


async def test_publish_waits_for_the_restart_of_the_only_server(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await server.kill()
        pushing = asyncio.ensure_future(site.publish(5))
        await eventually(lambda: site.publisher is not None and site.publisher._servers)
        await server.restart()
        assert (await pushing).servers == 1
        assert server.version == "5"


async def test_publish_waits_beyond_timeout_s_while_the_only_server_loads_its_model(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_attempts = 0
    find_servers = ServersPublisher._find_servers

    async def find(publisher: ServersPublisher) -> list[ServerControl]:
        nonlocal num_attempts
        num_attempts += 1
        return await find_servers(publisher)

    monkeypatch.setattr(ServersPublisher, "_find_servers", find)
    monkeypatch.setattr(base, "WATCH_S", 60.0)
    async with servers(site, 1) as (server,):
        await site.publish(1)
        await server.kill()
        site.names.remove("llm_server", "s0")
        num_attempts = 0
        pushing = asyncio.ensure_future(site.publish(2))
        await eventually(lambda: num_attempts >= 1, "an attempt")
        site.clock.advance(500.0)
        await eventually(lambda: num_attempts >= 3, "further attempts")
        await server.restart()
        site.register(server, "s0")
        assert (await pushing).servers == 1
        assert server.version == "2"


async def test_full_disk_fails_the_publish_before_any_pause(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(0)
        before = len(server.calls)

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(hf_folder, "save_file", full)
        with pytest.raises(RoleError, match=r"version 1 could not be staged in .*No space left"):
            await site.publish(1)
        assert len(server.calls) == before
        assert site.versions() == ["v0"]


async def test_running_requests_survive_a_publish(site: Site) -> None:
    async with servers(site, 1) as (server,), aiohttp.ClientSession() as session:
        server.hold_after = 3
        protocol: ServerProtocol = part_of_entry("server_protocol", server.entry())()
        sampling = SamplingConfig(max_new_tokens=6)
        sent = GenerateRequest(rid="a", input_ids=[5, 6], sampling=sampling)
        body = protocol.encode_request(sent)
        request = session.post(server.url + protocol.generate_path, data=body)
        posting = asyncio.ensure_future(request)
        await server.held(1)
        await site.publish(1)
        server.release()
        answer = protocol.decode_answer(await (await posting).read())
        assert answer.spans == [
            VersionSpan(version="default", start=0, end=3),
            VersionSpan(version="1", start=3, end=6),
        ]


def test_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = tmp_path / f"arealite-{os.getuid()}-1-old"
    dead.mkdir()
    (dead / "v3").mkdir()
    other_user = tmp_path / f"arealite-{os.getuid() + 1}-1-old"
    other_user.mkdir()
    disk = DiskPublisherConfig(dir=str(tmp_path))
    config, engine = publishing(tmp_path, tmp_path, disk=disk), cast(Any, None)
    alive, second = DiskPublisher(config, engine), DiskPublisher(config, engine)
    assert alive.folder != second.folder
    assert not dead.exists()
    assert alive.folder.exists() and other_user.exists()
    alive.close()
    second.close()


def test_staging_uses_tmpfs_on_one_host_and_the_run_folder_on_several(site: Site) -> None:
    local = {"address": "http://127.0.0.1:1", "host": "x"}
    config = publishing(site.tmp_path, site.tmp_path)
    engine: Any = None
    publisher = DiskPublisher(config, engine)
    try:
        site.names.put("llm_server", "a", local)
        assert publisher.parent() == TMPFS
        site.names.put("llm_server", "b", {"address": "http://10.0.0.9:1", "host": "elsewhere"})
        assert publisher.parent() == run_paths(config).weights
    finally:
        publisher.close()
