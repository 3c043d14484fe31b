"""The requests of updates of vLLM servers, and servers that an update leaves without weights."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
import torch
from safetensors.torch import save_file

from arealite.api.llm import SamplingConfig
from arealite.api.server_protocol import GenerateRequest, ServerAnswer, VersionSpan
from arealite.ext.vllm.vllm_protocol import VLLMProtocol
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.vllm import FakeVLLM
from tests.impl.publisher.sites import Site, TwoParts, paths, servers
from tests.waiting import eventually

CHECK = "/collective_rpc arealite_check_weights"
STATE = "/collective_rpc arealite_state"
RELOAD = "/collective_rpc reload_weights"
UPDATE_STEPS = ("/start_weight_update", "/update_weights", "/finish_weight_update")


@pytest.fixture
def kind() -> type[ScriptedServer]:
    return FakeVLLM


async def generated(server: FakeVLLM, max_new_tokens: int = 6) -> ServerAnswer:
    """Return an answer of the server."""
    protocol = VLLMProtocol()
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    body = protocol.encode_request(
        GenerateRequest(rid="a", input_ids=[5, 6], sampling=sampling),
    )
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + protocol.generate_path, data=body) as reply,
    ):
        return protocol.decode_answer(await reply.read())


def is_left_paused(server: FakeVLLM, label: str) -> bool:
    """Return whether a failed update has left the server paused and labelled."""
    return (server.version, server.paused) == (label, "retract") and not server.running


async def test_update_is_checked_before_the_model_changes(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(7)
        assert paths(server)[-7:] == [
            "/pause",
            CHECK,
            "/start_weight_update",
            "/update_weights",
            "/reset_prefix_cache",
            "/finish_weight_update",
            "/resume",
        ]
        calls = dict(server.calls)
        folder = str(site.newest_folder())
        assert calls[CHECK]["kwargs"] == {"path": folder, "unused": []}
        assert calls["/update_weights"] == {"update_info": {"path": folder}}
        assert calls["/finish_weight_update"] == {"weight_version": "7"}


@pytest.mark.parametrize(
    ("mode", "query", "spans"),
    [
        ("abort", {"mode": "abort"}, [("default", 0, 3)]),
        ("retract", {"mode": "keep"}, [("default", 0, 3), ("1", 3, 6)]),
        (
            "in_place",
            {"mode": "keep", "clear_cache": "false"},
            [("default", 0, 3), ("1", 3, 6)],
        ),
    ],
)
async def test_pause_modes_end_or_keep_the_generations(
    site: Site, mode: str, query: dict[str, str], spans: list[tuple[str, int, int]]
) -> None:
    async with servers(site, 1) as (server,):
        await generated(server, 1)
        server.hold_after = 3
        generating = asyncio.ensure_future(generated(server))
        await server.held(1)
        await site.publish(1, pause_mode=mode)
        assert dict(server.calls)["/pause"] == query
        server.release()
        answer = await generating
        assert answer.finish == ("abort" if mode == "abort" else "length")
        assert answer.spans == [
            VersionSpan(version=version, start=start, end=end) for version, start, end in spans
        ]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_prompts_after_an_update_use_no_prefix_of_earlier_weights(
    site: Site, mode: str
) -> None:
    async with servers(site, 1) as (server,):
        await generated(server)
        await site.publish(1, pause_mode=mode)
        await generated(server)
        assert server.stale_prefix_hits == 0


async def test_cached_prompts_that_are_not_dropped_fail_the_update(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(site, 2) as (good, bad):
        with monkeypatch.context() as patch:
            patch.setattr(FakeVLLM, "holds_blocks", property(lambda server: server is bad))
            report = await site.publish(1)
            assert (report.servers, report.quarantined) == (1, ["s1"])
        await eventually(lambda: "s1" not in site.quarantined() and bad.paused is None)
        assert (good.version, bad.version) == ("1", "1")


async def test_label_is_read_back_after_an_update(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(site, 2) as (_, forgetful):
        label = property(lambda server: "6", lambda server, version: None)
        kind = type("Forgetful", (FakeVLLM,), {"version": label})
        monkeypatch.setattr(forgetful, "__class__", kind)
        report = await site.publish(7)
        assert (report.servers, report.quarantined) == (1, ["s1"])
        assert site.publisher is not None
        (error,) = [server.error for server in site.publisher._servers.values() if server.error]
        assert "holds version 6, not 7" in error


# ------------------------------------------------------------ refused and failed updates


async def test_refused_weights_leave_the_old_ones_and_the_server_in_traffic(site: Site) -> None:
    folder = site.tmp_path / "other"
    folder.mkdir()
    save_file({"a.weight": torch.zeros(2, 3)}, folder / "model.safetensors")
    async with servers(site, 1) as (good,), FakeVLLM(model_path=str(folder)) as other:
        # The publisher cannot read the model folder of a server on another host.
        site.names.put("llm_server", "other", other.entry() | {"model_path": "remote", "pid": 7})
        report = await site.publish(1)
        assert (report.servers, report.quarantined, good.version) == (1, ["other"], "1")
        await eventually(lambda: other.paused is None, "a continue")
        assert (other.version, other.weights.content) == ("default", "start")
        assert "/start_weight_update" not in paths(other)
        assert (await generated(other)).finish == "length"
        assert site.publisher is not None
        (error,) = [server.error for server in site.publisher._servers.values() if server.error]
        assert "'b.weight' [5] is not in the served model" in error


@pytest.mark.parametrize("step", ["/pause", CHECK, "/start_weight_update"])
async def test_failure_before_the_model_changes_leaves_the_server_in_traffic(
    site: Site, step: str
) -> None:
    async with servers(site, 2) as (_, bad):
        await site.publish(1)
        bad.fail_next("500", count=1000, path=step)
        report = await site.publish(2)
        assert report.quarantined == ["s1"]
        bad.recover()
        await eventually(lambda: bad.version == "2" and bad.paused is None, "an update")
        assert "/update_weight_version" not in paths(bad)


@pytest.mark.parametrize("step", ["/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("has_modules", [True, False], ids=["our modules", "stock"])
async def test_failure_in_the_middle_leaves_the_server_paused_and_labelled(
    site: Site, step: str, has_modules: bool
) -> None:
    if not has_modules:
        step = RELOAD
    async with servers(site, 2) as (good, bad):
        bad.has_modules = has_modules
        await site.publish(1)
        bad.hold_after = 3
        generating = asyncio.ensure_future(generated(bad))
        await bad.held(1)
        bad.fail_next("500", count=1000, path=step)
        report = await site.publish(2)
        assert (report.servers, report.quarantined, good.version) == (1, ["s1"], "2")
        answer = await generating
        assert (answer.finish, len(answer.output_ids)) == ("abort", 3)
        await eventually(lambda: is_left_paused(bad, "-1"), "the label")
        bad.hold_after = None
        waiting = asyncio.ensure_future(generated(bad))
        await bad.received(len(bad.requests) + 1)
        bad.recover()
        answer = await waiting
        if answer.finish == "abort":  # a further failed update has ended the request
            answer = await generated(bad)
        assert answer.spans == [VersionSpan(version="2", start=0, end=6)]
        assert (bad.version, bad.paused, bad.broken_tokens) == ("2", None, 0)


async def test_server_that_only_a_restart_repairs_is_labelled_so(site: Site) -> None:
    async with servers(site, 2) as (_, bad):
        bad.is_repairable = False
        await site.publish(1)
        bad.fail_next("500", path="/update_weights")
        assert (await site.publish(2)).quarantined == ["s1"]
        await eventually(lambda: is_left_paused(bad, "-2"), "the label")
        assert (await site.publish(3)).quarantined == ["s1"]
        assert is_left_paused(bad, "-2")
        await bad.restart()
        await eventually(lambda: bad.version == "3" and bad.paused is None, "an update")
        assert bad.broken_tokens == 0


@pytest.mark.parametrize("has_modules", [True, False], ids=["our modules", "stock"])
async def test_next_publisher_repairs_a_server_before_it_samples(
    site: Site, has_modules: bool
) -> None:
    """The publisher that left the server without weights has crashed."""
    async with servers(site, 1) as (server,):
        server.has_modules = has_modules
        server.paused = "retract"
        server.weights.begin_change()
        await site.publish(4)
        assert (server.version, server.paused, server.broken_tokens) == ("4", None, 0)
        assert (await generated(server)).finish == "length"


async def test_closed_publisher_leaves_a_server_without_weights_paused(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(0)
        server.on_hang = lambda: None
        server.fail_next("hang", path="/update_weights")
        pushing = asyncio.ensure_future(site.publish(1))
        await eventually(lambda: "/update_weights" in paths(server)[-1:], "the request")
        assert site.publisher is not None
        await asyncio.to_thread(site.publisher.close)
        await asyncio.wait([pushing])
        assert is_left_paused(server, "-1")
        assert (server.is_up, server.broken_tokens) == (True, 0)


# ------------------------------------------------------------ stock vLLM


async def test_server_without_our_modules_reloads_the_folder(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.has_modules = False
        await site.publish(7)
        assert paths(server)[-5:] == [
            "/pause",
            "/update_weight_version",
            RELOAD,
            "/reset_prefix_cache",
            "/resume",
        ]
        kwargs = {"weights_path": str(site.newest_folder())}
        assert dict(server.calls)[RELOAD]["kwargs"] == kwargs
        assert (server.version, server.paused) == ("7", None)


# ------------------------------------------------------------ updates in parts


async def test_update_in_parts_is_finished_with_the_last_part(site: Site) -> None:
    site.kind = TwoParts
    async with servers(site, 1) as (server,):
        server.weights.has_group = True
        await site.publish(1)
        assert (server.version, server.paused) == ("1", None)
        steps = [path for path in paths(server) if path in UPDATE_STEPS]
        assert steps == [
            "/start_weight_update",
            "/update_weights",
            "/update_weights",
            "/finish_weight_update",
        ]
        assert dict(server.calls)[CHECK]["kwargs"]["shapes"] == {
            "a.weight": [2, 3],
            "b.weight": [5],
        }


async def test_partial_update_leaves_the_server_paused_until_a_whole_one(site: Site) -> None:
    site.kind = TwoParts
    async with servers(site, 2) as (good, bad):
        for server in (good, bad):
            server.weights.has_group = True
        await site.publish(1)
        bad.fail_next("500", count=1000, path="/finish_weight_update")
        report = await site.publish(2)
        assert (good.version, report.servers) == ("2", 1)
        await eventually(lambda: is_left_paused(bad, "-1"), "the label")
        assert STATE in paths(bad)
        bad.recover()
        await eventually(lambda: bad.version == "2" and bad.paused is None, "an update")
        assert bad.broken_tokens == 0
