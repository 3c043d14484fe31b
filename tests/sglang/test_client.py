"""The rollout path on real SGLang: no episode is lost despite server faults and updates."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.api.llm import LLMRequest, SamplingConfig
from arealite.base.errors import ContextOverflow, GenerationRefused
from arealite.cli import main as cli
from arealite.ext.sglang import sglang_protocol
from tests.e2e.conftest import Site, write_rows
from tests.models import tiny_model
from tests.sglang import rollout as scenes
from tests.sglang.rollout import TOKENS, eventually, rollout, running, update
from tests.sglang.shared import SharedServer, shared_server

pytestmark = pytest.mark.sglang

MOVED_S = 3.0
"""Seconds until requests of a dead server run elsewhere and a new server gets requests."""


@pytest.fixture(scope="module")
def second_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with shared_server(tmp_path_factory.mktemp("second")) as server:
        yield server


@pytest.fixture
def second(sglang_server: SharedServer, second_session: SharedServer) -> SharedServer:
    """Return a second server of the same models, which a test may stop or kill."""
    second_session.folders = sglang_server.folders
    second_session.reset()
    return second_session


def request(**settings: object) -> LLMRequest:
    fields = {"max_new_tokens": 8} | {k: v for k, v in settings.items() if k != "input_ids"}
    sampling = SamplingConfig(**fields)  # type: ignore[arg-type]
    ids = settings.get("input_ids", [5, 6, 7])
    return LLMRequest(request_id="r", group_id="g", input_ids=ids, sampling=sampling)  # type: ignore[arg-type]


@pytest.mark.sglang_short
@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_update_interrupts_generations_and_loses_no_token(
    sglang_server: SharedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    async with rollout(tmp_path, monkeypatch, sglang_server) as run:
        run.start(6)
        await eventually(running(sglang_server, 24), "24 running requests")
        await update(sglang_server, mode, 1)
        responses = await run.end(24)
        stats = run.client.stats()
    partial = run.kept()
    assert all(len(r.output_ids) == TOKENS and r.stop_reason == "length" for r in responses)
    assert {v for r in responses for v in r.versions} == {0, 1}
    assert all(r.versions == sorted(r.versions) for r in responses)
    assert stats["failovers"] == stats["server_errors"] == 0
    answers = [answer for group in run.answers.values() for answer in group]
    if mode == "retract":
        assert stats["resubmissions"] == partial == 0
        assert len(answers) == 24
        assert sum(a["meta_info"]["num_retractions"] for a in answers) == stats["interruptions"] > 0
    else:
        cut = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "abort"]
        assert stats["resubmissions"] == len(cut) == stats["interruptions"] > 0
        assert partial > 0
    mixed = next((q, r) for q, r in run.client.finished if set(r.versions) == {0, 1})
    prompt, response = mixed[0].input_ids, mixed[1]
    recomputed = [
        scenes.logprobs_under(folder, prompt, response.output_ids)
        for folder in sglang_server.folders[:2]
    ]
    expected = [recomputed[version][i] for i, version in enumerate(response.versions)]
    assert response.logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.sglang_short
@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_each_token_is_streamed_once_across_an_update(
    sglang_server: SharedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    told: list[list[int]] = [[] for _ in range(8)]
    async with rollout(tmp_path, monkeypatch, sglang_server) as run:
        requests = [
            LLMRequest(
                request_id=f"s{n}",
                group_id="g",
                input_ids=[5, 6, 7 + n],
                sampling=scenes.EXACT,
                on_tokens=ids.extend,
            )
            for n, ids in enumerate(told)
        ]
        answers = asyncio.gather(*map(run.client.generate, requests))
        await eventually(lambda: all(told), "the first tokens")
        await update(sglang_server, mode, 1)
        responses = await answers
        resubmissions = run.client.stats()["resubmissions"]
    assert [response.output_ids for response in responses] == told
    assert all(len(response.output_ids) == TOKENS for response in responses)
    assert {tuple(sorted({*response.versions})) for response in responses} == {(0, 1)}
    assert all(response.versions == sorted(response.versions) for response in responses)
    assert (resubmissions > 0) == (mode == "abort")


async def test_stopped_server_gets_no_requests_until_it_continues(
    sglang_server: SharedServer,
    second: SharedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stopped server accepts connections and does not answer."""
    async with rollout(tmp_path, monkeypatch, sglang_server, second, connect_timeout_s=1.0) as run:
        run.start(8)
        frozen = run.client.server(second)
        await eventually(running(second, 8), "traffic on both servers")
        assert second.real is not None
        os.killpg(second.real.process.pid, signal.SIGSTOP)
        try:
            responses = await run.end(32)
            assert not frozen.alive
        finally:
            os.killpg(second.real.process.pid, signal.SIGCONT)
        run.kept()
        assert all(len(r.output_ids) == TOKENS for r in responses)
        assert run.client.stats()["failovers"] > 0

        def is_in_traffic() -> bool:
            states = run.client._router.servers.values()
            return any(state.alive and state.address == second.address for state in states)

        # Its entry may have died meanwhile; then the client has found it again.
        await eventually(is_in_traffic, "the thawed server in traffic")
        await eventually(second.idle, "the aborts to reach the thawed server")


async def test_new_server_gets_requests(
    sglang_server: SharedServer,
    second: SharedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await update(sglang_server, "retract", 1)
    async with rollout(tmp_path, monkeypatch, sglang_server, refresh_s=1.0) as run:
        run.start(8, version=1)
        await eventually(running(sglang_server, 32), "traffic on the first server")
        run.add(second)
        run.start(2, version=1)
        await eventually(lambda: len(run.client._router.servers) == 2, "the second server")
        late = run.client.server(second)
        await eventually(lambda: late.alive, "the second server's answer")
        assert (late.version, late.served) == (0, 0)  # the server does not have version 1 yet
        await update(second, "retract", 1)
        begin = time.perf_counter()
        await eventually(lambda: late.version == 1, "the second server's version", MOVED_S)
        run.start(4, version=1)
        await eventually(lambda: late.served, "traffic", MOVED_S)
        assert time.perf_counter() - begin < MOVED_S
        responses = await run.end(56)
    assert {version for r in responses for version in r.versions} == {1}
    assert run.client.stats()["failovers"] == 0


async def test_out_of_vocabulary_prompts_are_refused_by_the_client(
    sglang_server: SharedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rollout(tmp_path, monkeypatch, sglang_server) as run:
        run.add(sglang_server, vocab_size=None)  # the model's vocabulary is used instead
        server = run.client.server(sglang_server)
        for ids in ([5, 64], [5, -1], [10**9]):
            with pytest.raises(GenerationRefused, match="the model has 64"):
                await run.client.generate(request(input_ids=ids))
        with pytest.raises(ContextOverflow, match="exceed the context of 506"):
            await run.client.generate(request(input_ids=[5] * 499))
        assert server.served == 0
        assert len((await run.client.generate(request())).output_ids) <= 8
    assert sglang_server.get("/health")[0] == 200


async def test_resumed_prompt_near_the_context_limit_is_accepted(
    sglang_server: SharedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang accepts prompts of at most the context length minus 7, and shortens answers by 2."""
    status, info = sglang_server.get("/server_info")
    assert (status, info["max_req_input_len"]) == (200, 506)
    async with rollout(tmp_path, monkeypatch, sglang_server) as run:
        response = await run.client.generate(
            request(input_ids=[5] * 6, max_new_tokens=500, min_new_tokens=500)
        )
        assert len(response.output_ids) == 500
        again = request(input_ids=[5] * 505, max_new_tokens=1)
        assert len((await run.client.generate(again)).output_ids) == 1


async def test_refusals_raise_an_error_and_server_errors_are_retried(
    sglang_server: SharedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rollout(tmp_path, monkeypatch, sglang_server) as run:
        with pytest.raises(GenerationRefused, match="HTTP 400: temperature must be"):
            await run.client.generate(request(temperature=-1.0))
        encode, broken = (
            sglang_protocol.encode_body,
            [b'{"input_ids": [5], "rid": ["a", "b"]}'],
        )  # causes a 500
        monkeypatch.setattr(
            sglang_protocol, "encode_body", lambda b: broken.pop() if broken else encode(b)
        )
        assert len((await run.client.generate(request())).output_ids) <= 8
        assert run.client.stats()["server_errors"] == 1


def external(server: SharedServer, folder: Path) -> tuple[Site, str]:
    """Return the site and options of a run that uses this server by its address."""
    write_rows(folder / "train.jsonl", 64, seed=1)
    write_rows(folder / "eval.jsonl", 8, seed=2)
    address = server.address.removeprefix("http://")
    site = Site(folder, Path(server.folders[0]), server=None)  # type: ignore[arg-type]
    return site, f"llm_server.addresses=[{address}]"


def test_external_server_keeps_running_after_runs_that_use_it(
    sglang_server: SharedServer, tmp_path: Path
) -> None:
    site, addresses = external(sglang_server, tmp_path)
    for steps in (2, 1):  # the second run finds version 2 and starts with version 0
        done = site.train(tmp_path / str(steps), addresses, f"trainer.ppo.total_steps={steps}")
        assert done.code == 0, done.shown + done.logs()
        assert sglang_server.get("/model_info")[1]["weight_version"] == str(steps)
        assert sglang_server.get("/ready")[0] == 200  # 503 while paused
        assert not list((tmp_path / "names").rglob("llm_server/*.json"))
    assert sglang_server.alive


def test_external_server_with_another_model_is_refused(
    sglang_server: SharedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site, addresses = external(sglang_server, tmp_path)
    other = tiny_model(tmp_path / "other", hidden_size=64)
    words = site.command(tmp_path / "run", addresses, f"model.path={other}")[2:]
    assert cli.main(["train", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "it serves another model: its hidden_size is 32, model.path has 64" in line


async def test_episodes_of_a_killed_server_finish_on_another_server(
    sglang_server: SharedServer,
    second: SharedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rollout(tmp_path, monkeypatch, sglang_server, second) as run:
        run.start(16)
        victim, survivor = run.client.server(second), run.client.server(sglang_server)
        await eventually(lambda: victim.in_flight + survivor.in_flight == 64, "all requests")
        await eventually(running(second, 20), "traffic on the second server")
        # Half of the requests are aborted first; their tokens must survive the server's death.
        for rid in (f"l{number}/{member}/agent/0~0" for number in range(8) for member in range(4)):
            await asyncio.to_thread(second.post, "/abort_request", rid=rid)
        await eventually(lambda: len(run.answers) >= 16, "the cut answers")
        assert second.real is not None
        os.killpg(second.real.process.pid, signal.SIGKILL)
        begin = time.perf_counter()
        await eventually(lambda: not victim.in_flight, "the requests to move", MOVED_S)
        moved_s = time.perf_counter() - begin
        responses = await run.end(64)
        stats = run.client.stats()
    assert second.real.process.wait(60) == -signal.SIGKILL
    assert moved_s < MOVED_S
    assert stats["failovers"] > 0
    assert stats["server_errors"] == 0
    assert run.kept() > 0
    assert all(len(r.output_ids) == TOKENS for r in responses)
