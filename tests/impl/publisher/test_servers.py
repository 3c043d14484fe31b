"""Publishers refuse mismatched tensors and republish to restarted and faulty servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from arealite.base.errors import RoleError, UserError
from arealite.impl.publisher.disk import DiskPublisher
from arealite.system.health.waits import PAUSE_OBSERVER, Wait, table
from tests.impl.publisher.sites import Site, servers
from tests.waiting import eventually


async def test_tensors_that_mismatch_the_model_are_refused_before_any_request(site: Site) -> None:
    async with servers(site, 1) as (server,):
        save_file({"a.weight": torch.zeros(3, 2)}, site.tmp_path / "model" / "model.safetensors")
        with pytest.raises(UserError, match=r"'a\.weight' has shape \[2, 3\].* \[3, 2\] in "):
            await site.publish(1)
        assert server.calls == []


async def test_server_with_another_model_shape_is_quarantined_without_requests(site: Site) -> None:
    async with servers(site, 1), site.server_kind() as other:
        folder = site.tmp_path / "other"
        folder.mkdir()
        save_file({"a.weight": torch.zeros(2, 3)}, folder / "model.safetensors")
        site.names.put("llm_server", "other", other.entry() | {"model_path": str(folder), "pid": 7})
        report = await site.publish(1)
        assert (report.servers, report.quarantined) == (1, ["other"])
        assert other.calls == []
        assert isinstance(site.publisher, DiskPublisher)
        (error,) = [s.error for s in site.publisher._servers.values() if s.error]
        assert "the trainer's tensors differ: tensor 'b.weight' [5] is not in" in error


@pytest.mark.parametrize("number", range(3))
async def test_server_that_hangs_on_a_probe_is_quarantined_and_updated_later(
    site: Site, number: int
) -> None:
    async with servers(site, 2) as (good, silent):
        silent.fail_next(
            "hang", path=silent.probe_paths[number], count=1000
        )  # whichever of push and watch sends the first request
        report = await site.publish(1)
        assert (report.servers, report.quarantined, good.version) == (1, ["s1"], "1")
        assert site.expirer.expired[0] == 60.0
        silent.recover()
        await eventually(lambda: silent.version == "1" and silent.paused is None)


async def test_publish_fails_at_once_if_the_publisher_thread_fails_to_start(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("arealite.impl.publisher.servers.Pool", full)
    async with asyncio.timeout(60):
        with pytest.raises(RoleError, match=r"closed .*Too many open files"):
            await site.publish(1)


def pauses() -> list[Wait]:
    """Return the foreign pauses that this process shows in its vitals."""
    return [wait for wait in list(table) if wait.owner == PAUSE_OBSERVER]


def told(events: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return, for each line about a foreign pause, whether the server was continued."""
    return [e["continued"] for e in events if e["event"].startswith("server is paused by a client")]


async def test_server_paused_by_another_client_is_continued(site: Site) -> None:
    async with servers(site, 2) as (one, other):
        await site.publish(1)
        one.paused = "retract"
        await eventually(lambda: one.paused is None, "a continue")
        assert (one.version, other.version, pauses()) == ("1", "1", [])


async def test_each_pause_by_another_client_is_logged_once(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(1)
        with capture_logs() as events:
            server.stubborn, server.paused = 3, "abort"
            await eventually(lambda: server.paused is None, "a continue")
            assert told(events) == [True]
            server.asked_pause.clear()
            await asyncio.wait_for(server.asked_pause.wait(), 60)
            server.paused = "abort"
            await eventually(lambda: server.paused is None, "a continue")
        assert told(events) == [True, True]


async def test_continue_paused_false_leaves_a_foreign_pause_and_shows_it_as_a_wait(
    site: Site,
) -> None:
    async with servers(site, 1) as (server,):
        with capture_logs() as events:
            await site.publish(1, continue_paused=False)
            server.paused = "retract"
            (wait,) = await eventually(pauses, "a pause")
        assert (wait.on, server.paused, told(events)) == ("llm_server-s0", "retract", [False])
        assert "continue_paused=false" in wait.detail
        server.paused = None
        await eventually(lambda: not pauses(), "no pause")
        server.paused = "retract"
        await eventually(pauses, "a pause")
        site.names.remove("llm_server", "s0")
        await eventually(lambda: not pauses(), "no server")


async def test_pause_of_a_running_update_is_not_ended(site: Site) -> None:
    async with servers(site, 2) as (slow, other):
        await site.publish(1)
        hangs = asyncio.Event()
        slow.on_hang = hangs.set
        slow.fail_next("hang", path=slow.load_path)
        pushing = asyncio.ensure_future(site.publish(2))
        await hangs.wait()
        await eventually(lambda: other.version == "2" and other.paused is None, "an update")
        other.paused = "retract"
        await eventually(lambda: other.paused is None, "the watch to come round")
        assert (slow.paused, slow.version) == ("retract", "1")
        site.expirer.expire("llm_server-s0")
        assert (await pushing).version == 2


async def test_update_of_a_restarted_server_waits_for_the_one_of_its_old_process(
    site: Site,
) -> None:
    """The old process's update may have reached the new process, which has the same address."""
    async with servers(site, 2) as (slow, other):
        await site.publish(1)
        hangs = asyncio.Event()
        slow.on_hang = hangs.set
        slow.fail_next("hang", path=slow.load_path)
        pushing = asyncio.ensure_future(site.publish(2))
        await hangs.wait()
        site.names.put("llm_server", "s0", slow.entry() | {"pid": 7})
        await eventually(lambda: other.version == "2" and other.paused is None, "an update")
        assert site.publisher is not None
        controls = site.publisher._servers
        await eventually(lambda: (slow.url, 7) in controls, "the control of the new process")
        num_calls = len(slow.calls)
        for _ in range(2):
            other.paused = "retract"
            await eventually(lambda: other.paused is None, "the watch to come round")
        assert len(slow.calls) == num_calls
        site.expirer.expire("llm_server-s0")
        await pushing
        await eventually(lambda: slow.version == "2" and slow.paused is None, "an update")
