"""The requests of updates of SGLang servers, also of older versions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.sglang import FakeSGLang
from tests.impl.publisher.sites import Site, paths, servers
from tests.waiting import eventually


@pytest.fixture
def kind() -> type[ScriptedServer]:
    return FakeSGLang


async def test_update_is_paused_loaded_and_continued(site: Site) -> None:
    async with servers(site, 2) as made:
        await site.publish(7)
        for server in made:
            assert paths(server)[-4:] == [
                "/pause_generation",
                "/end_weight_update",
                "/update_weights_from_disk",
                "/continue_generation",
            ]
            body = dict(server.calls)["/update_weights_from_disk"]
            assert body["flush_cache"] is True
            assert body["weight_version"] == "7"
            assert server.model_path == str(site.newest_folder())


async def test_in_place_update_keeps_the_cache(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(1, pause_mode="in_place")
        calls = dict(server.calls)
        assert calls["/pause_generation"] == {"mode": "in_place"}
        assert calls["/update_weights_from_disk"]["flush_cache"] is False


async def test_server_paused_by_a_dead_publisher_is_continued_first(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.paused = "retract"
        await site.publish(1)
        assert paths(server)[0] == "/continue_generation"
        assert server.paused is None


async def test_session_of_a_dead_publisher_is_ended_once(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.weights.session = True
        await site.publish(1)
        assert server.weights.session is False
        await site.publish(2)
        assert paths(server).count("/end_weight_update") == 1


async def test_update_without_flush_is_flushed_and_confirmed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = FakeSGLang.change

    async def change(self: FakeSGLang, body: dict[str, Any]) -> bool:
        before = self.reported
        await plain(self, body)
        self._reported = before
        return False

    monkeypatch.setattr(FakeSGLang, "change", change)
    async with servers(site, 1) as (server,):
        report = await site.publish(3)
        assert (report.servers, server.reported, server.paused) == (1, "3", None)
        assert paths(server)[-5:] == [
            "/update_weights_from_disk",
            "/pause_generation",
            "/flush_cache",
            "/update_weight_version",
            "/continue_generation",
        ]


async def test_server_that_refuses_retract_is_paused_with_abort(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.fail_next("400", path="/pause_generation")
        await site.publish(1)
        modes = [body["mode"] for path, body in server.calls if path == "/pause_generation"]
        assert modes == ["retract", "abort"]
        assert server.version == "1"


async def test_server_without_version_spans_is_paused_with_abort(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.spans = False
        await site.publish(1)
        modes = [body["mode"] for path, body in server.calls if path == "/pause_generation"]
        assert modes == ["abort"]


async def test_server_without_a_route_for_pauses_is_continued_each_time(site: Site) -> None:
    async with servers(site, 2) as (one, other):
        one.tells_pause = False
        await site.publish(1)
        one.paused = "retract"
        await eventually(lambda: one.paused is None, "a continue")
        assert (one.version, other.version) == ("1", "1")
