"""What all publishers do with what servers really hold: found out, distrusted, put right."""

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


def labels(server: FakeSGLang) -> list[str]:
    return [body["new_version"] for path, body in server.calls if path == "/update_weight_version"]


async def push(site: Site, version: int):
    assert site.publisher is not None
    return await asyncio.to_thread(site.publisher.push, version)


async def test_a_server_that_lies_is_found_relabelled_and_healed(site: Site) -> None:
    async with servers(site, 3) as (first, second, liar):
        await site.publish(1)
        liar.weights.content = "other weights, same label"
        report = await push(site, 1)
        assert report.quarantined == ["s2"] and report.servers == 3
        assert labels(liar) == ["-1"] and labels(first) == labels(second) == []
        assert liar.version == "1"
        assert liar.weights.content == first.weights.content


async def test_one_server_alone_is_compared_with_itself(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(1)
        server.weights.content = "other weights, same label"
        report = await push(site, 1)
        assert report.quarantined == ["s0"] and labels(server) == ["-1"]
        assert server.version == "1"


async def test_a_server_that_stays_wrong_stays_out(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    async with servers(site, 3) as (_, _, bad):
        bad.checksum = "wrong for ever"
        report = await site.publish(1)
        assert (report.servers, report.quarantined, bad.version) == (2, ["s2"], "-1")
        report = await site.publish(2)
        assert (report.servers, report.quarantined, bad.version) == (2, ["s2"], "-1")
        assert labels(bad) == ["-1", "-1"], "once brought again, then left alone"


async def test_two_that_never_agree_end_the_run_with_both_values(site: Site) -> None:
    async with servers(site, 2) as (one, other):
        one.checksum, other.checksum = "x", "y"
        twice = lambda: labels(one) == labels(other) == ["-1", "-1"]  # noqa: E731
        await site.refused(1, twice, r"no server took version 1.*holds x, s1 holds y")


async def test_verify_every_second_version_or_never(site: Site) -> None:
    async with servers(site, 2) as (_, bad):
        bad.checksum = "wrong"
        assert (await site.publish(1, verify_every=2)).quarantined == []
        checks = [path for path, _ in bad.calls if path == "/weights_checker"]
        assert checks == []


async def test_servers_without_checksums_show_logprobs(site: Site) -> None:
    async with servers(site, 3) as made:
        for server in made:
            server.checksum = None
        made[2].logprob = lambda token: -9.0  # type: ignore[method-assign]
        report = await site.publish(1)
        assert report.quarantined == ["s2"] and made[2].version == "-1"


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
