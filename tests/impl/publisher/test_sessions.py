"""Updates of SGLang servers in several parts: session, version, flush, an incomplete update.

`distributed` sends parts; these tests send parts without a process group.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.sglang import FakeSGLang
from tests.impl.publisher.sites import GROUP, Site, TwoParts, paths, servers
from tests.waiting import eventually

PATH = "/update_weights_from_distributed"


@pytest.fixture
def kind() -> type[ScriptedServer]:
    return FakeSGLang


@pytest.fixture(autouse=True)
def site_of_parts(site: Site) -> None:
    site.kind = TwoParts


def bodies(server: FakeSGLang) -> list[dict[str, Any]]:
    return [body for path, body in server.calls if path == PATH]


async def test_version_and_flush_are_sent_with_the_last_part(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.weights.groups.append(GROUP)
        await site.publish(1)
        told = [(body["weight_version"], body["flush_cache"]) for body in bodies(server)]
        assert told == [(None, False), ("1", True)]
        assert paths(server)[-7:] == [
            *("/pause_generation", "/end_weight_update", "/begin_weight_update", PATH, PATH),
            *("/end_weight_update", "/continue_generation"),
        ]


async def test_old_server_is_updated_without_sessions(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.weights.groups.append(GROUP)
        server.sessions = False
        await site.publish(1)
        assert server.version == "1"
        assert not [path for path in paths(server) if "begin" in path]


async def test_unfinished_session_is_ended_before_the_next_update(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.weights.groups.append(GROUP)
        await site.publish(1)
        server.weights.session = True
        await site.publish(2)
        assert (server.version, server.weights.session) == ("2", False)


async def test_in_place_update_in_parts_never_flushes(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.weights.groups.append(GROUP)
        await site.publish(1, pause_mode="in_place")
        assert [body["flush_cache"] for body in bodies(server)] == [False, False]


async def test_partial_update_clears_the_version_first(site: Site) -> None:
    async with servers(site, 2) as (good, bad):
        for server in (good, bad):
            server.weights.groups.append(GROUP)
        await site.publish(1)
        bad.fail_next("500", count=1000, path=PATH)
        report = await site.publish(2)
        assert (good.version, report.servers) == ("2", 1)
        # A quarantined server is continued in the background.
        await eventually(lambda: "/update_weight_version" in paths(bad) and bad.paused is None)
        first = paths(bad).index("/update_weight_version")
        assert bad.calls[first][1]["new_version"] == "-1"
        assert paths(bad)[first - 2 : first + 2] == [
            *(PATH, "/end_weight_update", "/update_weight_version", "/continue_generation")
        ]
        bad.recover()
        await eventually(lambda: bad.version == "2" and bad.paused is None)
