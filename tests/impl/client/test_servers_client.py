"""The client with scripted servers: generations are complete despite aborts and crashes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from arealite.api.launcher import LauncherConfig
from arealite.api.llm import LLMClientConfig, LLMResponse
from arealite.base.errors import (
    ContextOverflow,
    DeadlineError,
    GenerationRefused,
    InvariantError,
    ServerUnavailable,
)
from arealite.impl.client import servers_client
from arealite.impl.client.servers_client import ServersClient
from arealite.system.health.waits import table
from tests.fakes.scripted_server import next_letter
from tests.fakes.vllm import FakeVLLM
from tests.impl.client.conftest import Site, request
from tests.waiting import eventually


def expected(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_letter(ids))
    return ids[len(prompt) :]


async def aborted_before_the_end(site: Site, settings: dict[str, Any]) -> LLMResponse:
    """Return a generation that was aborted after 3 tokens, before the server noticed its end."""
    (server,) = site.servers
    finish, server._finish = server._finish, lambda job: None
    server.hold_after = 3
    task = asyncio.create_task(site.generate(**settings))
    await server.held(1)
    server._finish = finish
    await server.abort_all()
    await server.pause("abort")
    response = await task
    assert len(server.requests) == 1
    return response


async def test_request_and_response_are_complete(site) -> None:
    async with site({"version": "3"}) as s:
        response = await s.generate(temperature=0.7)
        sent = s.servers[0].requests[0]
    assert response.output_ids == expected([10, 20, 30], 8)
    assert response.logprobs == [s.servers[0].logprob(t) for t in response.output_ids]
    assert response.versions == [3] * 8
    assert response.stop_reason == "length"
    assert sent.rid == "g/0~0"
    assert sent.sampling["temperature"] == 0.7
    assert {"top_p", "top_k", "max_new_tokens"} <= sent.sampling.keys()


async def test_stop_token_ends_a_generation(site) -> None:
    third = expected([10, 20, 30], 3)[2]
    async with site() as s:
        response = await s.generate(stop_token_ids=[third])
    assert response.stop_reason == "stop"
    assert response.output_ids == expected([10, 20, 30], 3)


async def test_aborted_generation_is_resubmitted_with_its_remaining_budget(site) -> None:
    async with site({"version": "1", "hold_after": 3}) as s:
        (server,) = s.servers
        task = asyncio.create_task(s.generate(min_new_tokens=4))
        await server.held(1)
        await server.push("2", "abort")
        response = await task
        first, second = server.requests
        stats = s.client.stats()
    assert response.output_ids == expected([10, 20, 30], 8)
    assert response.versions == [1] * 3 + [2] * 5
    assert (response.interruptions, response.stop_reason) == (1, "length")
    assert second.input_ids == first.input_ids + response.output_ids[:3]
    assert second.sampling["max_new_tokens"] == 5
    assert second.sampling["min_new_tokens"] == 1
    assert second.rid != first.rid
    assert (stats["resubmissions"], stats["interruptions"]) == (1, 1)


async def test_aborted_generation_reports_partial_tokens_and_resumes_from_them(site) -> None:
    """A generation resumed from partial tokens does not sample them again, as after a crash."""
    told: list[LLMResponse] = []
    async with site({"version": "1", "hold_after": 3}) as s:
        (server,) = s.servers
        task = asyncio.create_task(s.generate(on_partial=told.append))
        await server.held(1)
        await server.push("2", "abort")
        whole = await task
        (partial,) = told
        assert (partial.output_ids, partial.versions) == (whole.output_ids[:3], [1] * 3)
        assert (partial.stop_reason, partial.interruptions) == ("", 1)
        again = await s.generate(request_id="other", resumed=partial)
        assert server.requests[-1].input_ids == [10, 20, 30, *partial.output_ids]
        assert server.requests[-1].sampling["max_new_tokens"] == 5
    assert again.output_ids == whole.output_ids
    assert again.versions == [1] * 3 + [2] * 5
    assert again.logprobs == whole.logprobs
    assert (again.stop_reason, again.interruptions) == ("length", 2)
    assert len(partial.output_ids) == 3, "what was told is left alone"


async def test_waits_show_server_and_generation(site) -> None:
    async with site({"hold_after": 1}, {"hold_after": 1}) as s:
        tasks = [asyncio.create_task(s.generate(f"g{n}")) for n in range(2)]
        for server in s.servers:
            await server.held(1)
        shown = {(w.event, w.owner, w.on) for w in table if w.event.startswith("generation")}
        assert {what for what, _, _ in shown} == {"generation g0/0", "generation g1/0"}
        assert {on for _, _, on in shown} == {"llm_server-s0", "llm_server-s1"}
        assert {owner for _, owner, _ in shown} == {"llm client"}
        waiting = asyncio.create_task(s.generate("late", min_version=9))
        await asyncio.sleep(0)
        assert ("generation late/0", "llm_server") in {(w.event, w.on) for w in table}
        for task in (*tasks, waiting):
            task.cancel()
        await asyncio.wait([*tasks, waiting])


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_paused_generation_keeps_its_version_spans(site, mode: str) -> None:
    async with site({"version": "1", "hold_after": 3}) as s:
        (server,) = s.servers
        task = asyncio.create_task(s.generate())
        await server.held(1)
        await server.push("2", mode)
        response = await task
        assert len(server.requests) == 1
    assert response.versions == [1] * 3 + [2] * 5
    # vLLM does not count retractions: each further version counts as one.
    assert response.interruptions == (mode == "retract" or isinstance(server, FakeVLLM))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_new_tokens": 3}, "length"),
        ({"stop_token_ids": expected([10, 20, 30], 3)[-1:]}, "stop"),
    ],
)
async def test_abort_after_the_last_token_ends_the_generation(site, settings, reason: str) -> None:
    async with site() as s:
        response = await aborted_before_the_end(s, settings)
    assert (response.output_ids, response.stop_reason) == (expected([10, 20, 30], 3), reason)


async def test_abort_after_the_models_eos_ends_the_generation(site, experiment, tmp_path) -> None:
    third = expected([10, 20, 30], 3)[2]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [third, 1]}))
    object.__setattr__(experiment.model, "path", str(tmp_path))
    async with site({"hold_after": 3}) as s:
        task = asyncio.create_task(s.generate())
        await s.servers[0].held(1)
        await s.servers[0].pause("abort")
        assert (await task).stop_reason == "stop"
        assert len(s.servers[0].requests) == 1


async def test_abort_without_tokens_is_retried_with_backoff(site) -> None:
    async with site() as s:
        s.servers[0].fail_next("abort", count=3)
        response = await s.generate()
        assert response.output_ids == expected([10, 20, 30], 8)
        assert response.interruptions == 3
        assert len(s.servers[0].requests) == 4


async def test_requests_of_a_dead_server_fail_over(site) -> None:
    async with site({"hold_after": 2}, {}) as s:
        first, second = s.servers
        tasks = [asyncio.create_task(s.generate("g", request_id=f"g/{i}")) for i in range(4)]
        await first.held(4)
        await first.kill()
        responses = await asyncio.gather(*tasks)
        assert len(second.requests) == 4
        assert s.client.stats()["failovers"] == 4
        await s.generate("other")
        assert len(second.requests) == 5
    assert all(r.output_ids == expected([10, 20, 30], 8) for r in responses)
    assert all(r.interruptions == 0 for r in responses)


async def test_failover_keeps_the_partial_output(site) -> None:
    async with site({"version": "1", "hold_after": 3}, {"version": "2"}) as s:
        first, second = s.servers
        task = asyncio.create_task(s.generate())
        await first.held(1)
        first.fail_next("die")  # the server dies at the resubmission
        await first.abort_all()
        response = await task
        moved = second.requests[0]
    assert moved.input_ids == [10, 20, 30, *response.output_ids[:3]]
    assert response.output_ids == expected([10, 20, 30], 8)
    assert response.versions == [1] * 3 + [2] * 5


async def test_request_leaves_a_silent_server_when_its_entry_is_removed(site) -> None:
    async with site({}, {}, refresh_s=600.0) as s:
        first, second = s.servers
        first.fail_next("hang")
        task = asyncio.create_task(s.generate())
        await first.received(1)
        s.silent.add(first)
        while not task.done():  # a heartbeat may be writing the entry
            s.names.remove("llm_server", "s0")
            s.client._directory.request_refresh()
            await asyncio.wait([task], timeout=0.1)
        assert (await task).output_ids == expected([10, 20, 30], 8)
        assert len(second.requests) == 1


async def test_request_leaves_a_server_whose_entry_expires(site) -> None:
    async with site({}, {}, refresh_s=600.0) as s:
        first, second = s.servers
        s.client._directory.refresh_s, s.client._directory.registry.ttl_s = 0.05, 0.5
        first.fail_next("hang")
        s.silent.add(first)
        s.client._directory.request_refresh()
        assert (await s.generate()).stop_reason == "length"
        assert len(second.requests) == 1


async def test_failed_server_gets_no_request_until_its_entry_is_renewed(site) -> None:
    async with site({}, {}) as s:
        first, second = s.servers
        s.silent.add(first)
        first.fail_next("reset")
        await s.generate("a")
        for group in range(4):
            await s.generate(str(group))
        assert (len(first.requests), len(second.requests)) == (1, 5)
        s.silent.clear()
        while len(first.requests) < 2:
            await s.client._directory.changed()
            await s.generate(f"again {len(second.requests)}")


async def test_new_version_is_detected_without_a_refresh(site) -> None:
    async with site(refresh_s=600.0) as s:
        (server,) = s.servers
        server.version = "1"
        async with asyncio.timeout(60):
            assert (await s.generate(min_version=1)).versions == [1] * 8


async def test_restarted_server_gets_requests_again(site) -> None:
    async with site() as s:
        (server,) = s.servers
        await server.kill()
        task = asyncio.create_task(s.generate())
        while not s.client.stats()["failovers"]:
            await s.client._directory.changed()
        await server.restart()
        assert (await task).output_ids == expected([10, 20, 30], 8)


async def test_request_in_backoff_occupies_no_server(site) -> None:
    async with site() as s:
        s.servers[0].fail_next("reset", count=3)
        back_off, backs_off, go_on = s.client._back_off, asyncio.Event(), asyncio.Event()

        async def for_long(generation) -> None:
            await back_off(generation)
            backs_off.set()
            await go_on.wait()

        s.client._back_off = for_long
        task = asyncio.create_task(s.generate())
        async with asyncio.timeout(60):
            await backs_off.wait()
        (server,) = s.client._router.servers.values()
        assert (server.in_flight, server.waits) == (0, {})
        server.remove_from_traffic()
        go_on.set()
        assert (await task).stop_reason == "length"


async def test_generation_without_a_live_server_fails_at_the_deadline(site) -> None:
    async with site() as s:
        await s.servers[0].kill()
        with pytest.raises(ServerUnavailable, match=r"unreachable|deadline.*concurrency"):
            await s.generate(deadline_s=0.3)  # the error may name the server or not
        (server,) = s.client._router.servers.values()
        await eventually(lambda: not server.alive, "the loss of the server")
        with pytest.raises(ServerUnavailable, match="unreachable"):
            await s.generate(deadline_s=0.1)


async def test_generation_is_aborted_at_its_deadline(site) -> None:
    async with site({"hold_after": 2}) as s:
        with pytest.raises(ServerUnavailable, match="deadline"):
            await s.generate(deadline_s=0.2)
        await s.client.close()
        assert s.servers[0].abort_rids == ["g/0~0"]


async def test_cancelled_generation_is_aborted_at_the_server(site) -> None:
    async with site({"hold_after": 2}) as s:
        task = asyncio.create_task(s.generate())
        await s.servers[0].held(1)
        task.cancel()
        await asyncio.wait([task])
        await s.client.close()
        assert task.cancelled()
        assert s.servers[0].abort_rids == ["g/0~0"]


async def test_refused_request_raises_the_servers_message(site) -> None:
    async with site() as s:
        s.servers[0].fail_next("400")
        with pytest.raises(GenerationRefused, match="scripted 400"):
            await s.generate()
        assert len(s.servers[0].requests) == 1


async def test_server_error_is_retried_at_another_server(site) -> None:
    async with site({}, {}) as s:
        s.servers[0].fail_next("500")
        s.servers[1].fail_next("reset")
        assert (await s.generate()).stop_reason == "length"
        assert [len(server.requests) for server in s.servers] == [2, 1]
        assert s.client.stats()["server_errors"] == 1


async def test_number_of_server_errors_is_bounded(site, monkeypatch) -> None:
    monkeypatch.setattr(servers_client, "MAX_SERVER_ERRORS", 3)
    async with site() as s:
        s.servers[0].fail_next("500", count=10)
        with pytest.raises(ServerUnavailable, match="scripted 500"):
            await s.generate()
        assert len(s.servers[0].requests) == 3


async def test_malformed_answer_counts_as_a_server_error(site, monkeypatch) -> None:
    monkeypatch.setattr(servers_client, "MAX_SERVER_ERRORS", 2)
    async with site({}, {}) as s:
        s.servers[0].whole_answer = lambda job: {"output_ids": "many"}
        assert (await s.generate()).stop_reason == "length"
        s.servers[1].whole_answer = s.servers[0].whole_answer
        with pytest.raises(ServerUnavailable, match="not an answer"):
            await s.generate()


async def test_silent_server_does_not_delay_detection_of_another_servers_version(site) -> None:
    async with site({}, {}, connect_timeout_s=600.0, refresh_s=600.0) as s:
        first, second = s.servers
        s.silent.add(first)
        second.version = "1"
        async with asyncio.timeout(60):
            assert (await s.generate(min_version=1)).versions == [1] * 8


async def test_only_servers_with_min_version_get_requests(site) -> None:
    async with site({"version": "1"}, {"version": "2"}) as s:
        for group in range(4):
            response = await s.generate(str(group), min_version=2)
            assert response.versions == [2] * 8
        assert not s.servers[0].requests
        task = asyncio.create_task(s.generate("late", min_version=3))
        await s.client._directory.changed()
        assert not task.done()
        s.servers[0].version = "3"
        assert (await task).versions == [3] * 8
        assert s.client.stats()["server_waits"] == 1


async def test_answer_of_a_restarted_server_below_min_version_is_rejected(site) -> None:
    async with site({"version": "5"}, {"version": "5"}, refresh_s=60.0) as s:
        await s.servers[0].restart()  # version 0 again; the client has not detected it
        response = await s.generate(min_version=5)
        assert response.versions == [5] * 8
        assert s.client.stats()["stale_answers"] + s.client.stats()["failovers"] >= 1


@pytest.mark.parametrize("ids", [[], [320], [-1]])
async def test_empty_and_out_of_vocabulary_prompts_are_refused_by_the_client(
    site, ids: list[int]
) -> None:
    async with site() as s:
        with pytest.raises(GenerationRefused):
            await s.generate(input_ids=ids)
        assert not s.servers[0].requests


async def test_overlong_requests_are_refused_by_the_client(site) -> None:
    async with site({"context_length": 100}) as s:
        with pytest.raises(ContextOverflow, match="3 prompt tokens"):
            await s.generate(max_new_tokens=98)
        assert (await s.generate(max_new_tokens=97)).stop_reason == "length"
        assert len(s.servers[0].requests) == 1


async def test_missing_logprobs_raise_an_invariant_error(site) -> None:
    async with site() as s:
        s.servers[0].logged = lambda ids: ids[:-1]
        with pytest.raises(InvariantError):
            await s.generate()


async def test_start_without_servers_fails_with_the_command_that_starts_one(experiment) -> None:
    object.__setattr__(experiment, "server_wait_s", 0.1)
    client = ServersClient(experiment, LLMClientConfig())
    with pytest.raises(DeadlineError, match="launch_llm_server"):
        await client.start()
    await client.close()


@pytest.mark.parametrize(("own", "seconds"), [(0, 0.1), (1, 600.0)])
def test_servers_started_by_the_launcher_extend_the_wait(
    experiment, own: int, seconds: float
) -> None:
    object.__setattr__(experiment, "server_wait_s", 0.1)
    object.__setattr__(experiment, "launcher", LauncherConfig(llm_servers=own))
    assert ServersClient(experiment, LLMClientConfig())._server_wait_s == seconds


async def test_120_concurrent_generations_return_correct_tokens(site) -> None:
    async with site({"token_s": 0.0005}, {"token_s": 0.001}, {}) as s:
        prompts = [[3 + i % 200, 5 + i % 50] for i in range(120)]
        tasks = [
            asyncio.create_task(
                s.client.generate(request(f"g{i // 4}", request_id=str(i), input_ids=prompt))
            )
            for i, prompt in enumerate(prompts)
        ]
        await s.servers[0].received(10)
        for server in s.servers[:2]:
            await server.push("1", "abort")
        await s.servers[2].kill()
        responses = await asyncio.gather(*tasks)
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.output_ids == expected(prompt, 8)
        assert len(response.versions) == len(response.logprobs) == 8
        assert response.versions == sorted(response.versions)
