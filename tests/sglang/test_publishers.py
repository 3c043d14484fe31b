"""Every publisher with real SGLang: versions of tokens, and faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from arealite.api.publisher import DiskPublisherConfig, PublishReport
from arealite.base.errors import UserError
from arealite.ext.distributed.distributed_publisher import DistributedPublisher
from arealite.impl.publisher import servers as base
from arealite.impl.publisher.control import ServerControl
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.publisher.servers import ServersPublisher
from arealite.system.names.name_registry import NameRegistry
from tests.impl.publisher.sites import publishing
from tests.sglang.shared import SharedServer, call, shared_server
from tests.waiting import until

pytestmark = pytest.mark.sglang
WAYS = [DiskPublisher, DistributedPublisher]
EACH = pytest.mark.parametrize("way", WAYS)
PROMPT = [5, 6, 7]
LONG = 480


class PublisherSetup:
    """A publisher of real servers, with callbacks during the stream of tensors."""

    def __init__(self, folder: Path, *servers: SharedServer) -> None:
        self.folder, self.servers = folder, servers
        self.models = servers[0].folders
        self.names = NameRegistry.of(publishing(folder, Path(self.models[0])))
        for number, server in enumerate(servers):
            assert server.real is not None
            entry = {"address": server.address, "type": "sglang", "pid": server.real.process.pid}
            self.names.put("llm_server", f"s{number}", entry | {"model_path": server.folders[0]})
        self.publisher: ServersPublisher | None = None

    def make(self, way: type[ServersPublisher], **settings: Any) -> ServersPublisher:
        disk = DiskPublisherConfig(dir=str(self.folder / "staged"))
        settings = {"timeout_s": 20.0, "bucket_mb": 0, "disk": disk} | settings
        engine: Any = None
        self.publisher = way(publishing(self.folder, Path(self.models[0]), **settings), engine)
        return self.publisher

    def publish(
        self, version: int, model: int, at_5: Callable[[], object] | None = None
    ) -> PublishReport:
        """Publish the weights of `models[model]`; call `at_5` once, before the fifth tensor."""
        assert self.publisher is not None
        weights = load_file(Path(self.models[model]) / "model.safetensors")
        hooks = [at_5] if at_5 else []

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            assert self.publisher is not None
            for number, item in enumerate(weights.items()):
                if number == 5 and self.publisher.shapes and hooks:
                    hooks.pop()()
                yield item

        while self.publisher.stage(version, stream()):
            pass
        return self.publisher.push(version)


@pytest.fixture
def publisher_setup(
    tmp_path: Path, sglang_server: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PublisherSetup]:
    monkeypatch.setattr(base, "WATCH_S", 0.2)
    made = PublisherSetup(tmp_path, sglang_server)
    yield made
    if made.publisher is not None:
        made.publisher.close()


@pytest.fixture(scope="module")
def second_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with shared_server(tmp_path_factory.mktemp("second")) as server:
        yield server


@pytest.fixture
def two_servers(
    tmp_path: Path,
    sglang_server: SharedServer,
    second_session: SharedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[PublisherSetup]:
    """Return a publisher for the session's server and a second server that may be killed."""
    monkeypatch.setattr(base, "WATCH_S", 0.2)
    second_session.reset()
    made = PublisherSetup(tmp_path, sglang_server, second_session)
    yield made
    if made.publisher is not None:
        made.publisher.close()


def generate(server: SharedServer, tokens: int = 8, **sampling: Any) -> dict[str, Any]:
    settings = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0} | sampling
    body = {"input_ids": PROMPT, "sampling_params": settings, "return_logprob": True}
    status, answer = server.post("/generate", seconds=60.0, **body)
    assert status == 200, answer
    return answer


def greedy(server: SharedServer) -> list[int]:
    return generate(server, temperature=0.0)["output_ids"]


def version(server: SharedServer) -> str:
    return server.get("/model_info")[1]["weight_version"]


def recomputed(folder: str, output: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits_TV = model(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    ids_T1 = torch.tensor(output)[:, None]
    return logits_TV.double().log_softmax(-1).gather(-1, ids_T1)[:, 0].tolist()


def during_generation(
    publisher_setup: PublisherSetup, act: Callable[[], Any]
) -> tuple[dict[str, Any], Any]:
    """Call `act` during a long generation; return both results."""
    server = publisher_setup.servers[0]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(generate, server, LONG)
        until(lambda: not server.idle(), what="a running request")
        done = act()
        return asked.result(60.0), done


@pytest.mark.sglang_short
@EACH
def test_each_token_has_the_version_that_sampled_it(
    publisher_setup: PublisherSetup, way: Any
) -> None:
    publisher_setup.make(way)
    publisher_setup.publish(0, 0)
    answer, report = during_generation(publisher_setup, lambda: publisher_setup.publish(1, 1))
    assert (report.servers, report.quarantined) == (1, [])
    meta = answer["meta_info"]
    old, new = meta["weight_versions"]
    assert (old["version"], new["version"]) == ("0", "1")
    assert 0 < old["end"] == new["start"] < new["end"] == LONG
    assert meta["num_retractions"] == 1
    told = [part[0] for part in meta["output_token_logprobs"]]
    for span, model in ((old, 0), (new, 1)):
        part = slice(span["start"], span["end"])
        expected = recomputed(publisher_setup.models[model], answer["output_ids"])[part]
        assert told[part] == pytest.approx(expected, abs=1e-4)


@EACH
def test_abort_keeps_every_partial_token(publisher_setup: PublisherSetup, way: Any) -> None:
    publisher_setup.make(way, pause_mode="abort")
    publisher_setup.publish(0, 0)
    answer, report = during_generation(publisher_setup, lambda: publisher_setup.publish(1, 1))
    assert report.servers == 1 and version(publisher_setup.servers[0]) == "1"
    meta, output = answer["meta_info"], answer["output_ids"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(output) < LONG
    assert [part[1] for part in meta["output_token_logprobs"]] == output
    told = [part[0] for part in meta["output_token_logprobs"]]
    assert told == pytest.approx(recomputed(publisher_setup.models[0], output), abs=1e-4)


@EACH
def test_in_place_continues_and_never_flushes(publisher_setup: PublisherSetup, way: Any) -> None:
    publisher_setup.make(way, pause_mode="in_place")
    publisher_setup.publish(0, 0)
    answer, report = during_generation(publisher_setup, lambda: publisher_setup.publish(1, 1))
    assert report.servers == 1
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    assert answer["meta_info"]["num_retractions"] == 0


@EACH
def test_update_without_flush_is_repaired(
    publisher_setup: PublisherSetup, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush during requests fails: the server has new weights and the old version."""
    publisher_setup.make(way, pause_mode="in_place")
    publisher_setup.publish(0, 0)
    pause = ServerControl.pause

    async def pause_and_flush(self: ServerControl, mode: str) -> None:
        await pause(self, mode)
        self.flush = True

    monkeypatch.setattr(ServerControl, "pause", pause_and_flush)
    answer, report = during_generation(publisher_setup, lambda: publisher_setup.publish(1, 1))
    assert report.servers == 1 and version(publisher_setup.servers[0]) == "1"
    assert len(answer["output_ids"]) == LONG
    expected = recomputed(publisher_setup.models[1], answer["output_ids"])[-50:]
    told = [part[0] for part in answer["meta_info"]["output_token_logprobs"]][-50:]
    assert told == pytest.approx(expected, abs=1e-4), "no token came of an old cache"


@EACH
def test_mismatched_tensors_are_not_sent(publisher_setup: PublisherSetup, way: Any) -> None:
    publisher, server = publisher_setup.make(way), publisher_setup.servers[0]
    for name, tensor in (("model.norm.weight", torch.zeros(7)), ("model.new", torch.zeros(2))):
        weights = load_file(Path(publisher_setup.models[1]) / "model.safetensors") | {name: tensor}
        with pytest.raises(UserError, match=f"tensor '{name}'"):
            publisher.stage(1, iter(weights.items()))
    assert version(server) == "default"
    assert server.post("/end_weight_update")[0] == 400, "no session was opened"


def test_pause_and_session_of_a_killed_client_are_ended(publisher_setup: PublisherSetup) -> None:
    server = publisher_setup.servers[0]
    dead = """
import os, sys, urllib.request
for path, body in (("/pause_generation", b'{"mode": "retract"}'), ("/begin_weight_update", b"{}")):
    request = urllib.request.Request(sys.argv[1] + path, body, {"Content-Type": "application/json"})
    assert urllib.request.urlopen(request, timeout=20).status == 200
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", dead, server.address], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert server.get("/ready")[0] == 503, "it is paused"
    publisher_setup.make(DistributedPublisher)
    assert publisher_setup.publish(1, 1).servers == 1
    assert server.get("/ready")[0] == 200
    assert version(server) == "1" and len(greedy(server)) == 8


def test_stopped_server_is_quarantined_within_timeout_s(two_servers: PublisherSetup) -> None:
    kept, stopped = two_servers.servers
    assert stopped.real is not None
    publisher = two_servers.make(DistributedPublisher, timeout_s=5.0)
    two_servers.publish(0, 0)
    group = stopped.real.process.pid

    def stop() -> None:
        os.killpg(group, signal.SIGSTOP)

    begin = time.monotonic()
    try:
        report = two_servers.publish(1, 1, at_5=stop)
        seconds = time.monotonic() - begin
        assert report.servers == 1 and version(kept) == "1"
        assert seconds < 5.0 + 5.0, "timeout_s, and the second round"
        assert len(greedy(kept)) == 8
    finally:
        os.killpg(group, signal.SIGCONT)
    until(lambda: publisher.needs_republish, what="the server to be back", seconds=30)
    assert two_servers.publish(1, 1).servers == 2
    assert version(stopped) == "1" and greedy(stopped) == greedy(kept)


def test_server_that_dies_while_paused_does_not_delay_the_other(
    two_servers: PublisherSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, dying = two_servers.servers
    two_servers.make(DiskPublisher)
    two_servers.publish(0, 0)
    pause = ServerControl.pause

    async def pause_and_die(self: ServerControl, mode: str) -> None:
        await pause(self, mode)
        if self.id == "s1" and dying.real is not None:
            assert call(dying.address, "/ready")[0] == 503
            dying.real.kill()

    monkeypatch.setattr(ServerControl, "pause", pause_and_die)
    report = two_servers.publish(1, 1)
    assert not dying.alive
    assert (report.servers, report.quarantined) == (1, ["s1"])
    assert version(kept) == "1" and len(greedy(kept)) == 8


def test_server_killed_during_an_update_is_quarantined(two_servers: PublisherSetup) -> None:
    kept, dying = two_servers.servers
    assert dying.real is not None
    two_servers.make(DistributedPublisher)
    two_servers.publish(0, 0)
    report = two_servers.publish(1, 1, at_5=dying.real.kill)
    assert not dying.alive
    assert (report.servers, report.quarantined) == (1, ["s1"])
    assert version(kept) == "1"
    output = generate(kept, 64)
    told = [part[0] for part in output["meta_info"]["output_token_logprobs"]]
    assert told == pytest.approx(recomputed(two_servers.models[1], output["output_ids"]), abs=1e-4)
