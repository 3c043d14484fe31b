"""Publishers refuse tensors that do not fit, and bring restarted and broken servers up to date."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import save_file

from arealite.base.errors import UserError
from arealite.impl.publisher.disk import DiskPublisher
from tests.fakes.sglang import FakeSGLang
from tests.impl.publisher.sites import Site, servers
from tests.waiting import eventually


async def test_tensors_that_do_not_fit_the_model_touch_no_server(site: Site) -> None:
    async with servers(site, 1) as (server,):
        save_file({"a.weight": torch.zeros(3, 2)}, site.tmp_path / "model" / "model.safetensors")
        with pytest.raises(UserError, match=r"'a\.weight' has shape \[2, 3\].* \[3, 2\] in "):
            await site.publish(1)
        assert server.calls == []


async def test_tensors_that_do_not_fit_a_server_quarantine_it_untouched(site: Site) -> None:
    async with servers(site, 1), FakeSGLang() as other:
        folder = site.tmp_path / "other"
        folder.mkdir()
        save_file({"a.weight": torch.zeros(2, 3)}, folder / "model.safetensors")
        site.names.put("llm_server", "other", other.entry() | {"model_path": str(folder), "pid": 7})
        report = await site.publish(1)
        assert (report.servers, report.quarantined) == (1, ["other"])
        assert other.calls == []
        assert isinstance(site.publisher, DiskPublisher)
        (error,) = [s.error for s in site.publisher._servers.values() if s.error]
        assert "'b.weight' [5] of the trainer is not in" in error


async def test_a_server_without_spans_is_paused_by_aborting(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.spans = False
        await site.publish(1)
        modes = [body["mode"] for path, body in server.calls if path == "/pause_generation"]
        assert modes == ["abort"]


@pytest.mark.parametrize("path", ["/openapi.json", "/server_info", "/continue_generation"])
async def test_a_server_silent_when_probed_is_quarantined_and_healed(site: Site, path: str) -> None:
    async with servers(site, 2) as (good, silent):
        silent.fail_next("hang", path=path, count=1000)  # whether push or watch asks first
        report = await site.publish(1)
        assert (report.servers, report.quarantined, good.version) == (1, ["s1"], "1")
        assert site.patience.ended[0] == 60.0
        silent.recover()
        await eventually(lambda: silent.version == "1" and silent.paused is None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_a_thread_that_fails_as_it_starts_is_not_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("arealite.impl.publisher.servers.aiohttp.ClientSession", full)
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="closed"):
            await site.publish(1)
