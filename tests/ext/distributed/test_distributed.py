"""Send weights through a process group to embedded servers in separate processes that crash."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from arealite.api.engine import Named
from arealite.api.publisher import Generate, PublishReport
from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.ext.distributed.config import DistributedPublisherConfig
from arealite.ext.distributed.distributed_publisher import DistributedPublisher
from arealite.impl.launcher.processes import IS_KEPT, PARENT
from arealite.impl.publisher import control
from arealite.impl.publisher import servers as base
from arealite.system.names.name_registry import NameRegistry
from tests.impl.publisher.sites import publishing
from tests.models import tiny_mixture
from tests.waiting import until

pytestmark = [pytest.mark.processes]
ROOT = Path(__file__).resolve().parents[3]


class Servers:
    """Embedded servers of one model, and a publisher that sends them a tensor at a time.

    The folder has a tensor for each expert; the servers join them when all have arrived.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, tiny_mixture(folder / "a", "qwen3_moe", seed=1)
        self.weights = {
            name: load_file(
                tiny_mixture(folder / name, "qwen3_moe", seed=seed) / "model.safetensors"
            )
            for seed, name in enumerate(("a", "b"), 1)
        }
        self.names = NameRegistry.of(publishing(folder, self.model))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.publisher: DistributedPublisher | None = None

    def start(self, count: int) -> None:
        for _ in range(count):
            number = len(self.processes)
            command = [sys.executable, str(ROOT / "arealite" / "launch_llm_server.py")]
            command += [f"cluster.name_root={self.folder / 'names'}", "cluster.user=test"]
            command += [f"model.path={self.model}", "cluster.ttl_s=600", "cluster.security=off"]
            with (self.folder / f"server-{number}.log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env=os.environ
                    | {"OMP_NUM_THREADS": "1", PARENT: str(os.getpid()), IS_KEPT: "1"},
                )
            self.processes[str(process.pid)] = process
        alive = lambda: {pid for pid, p in self.processes.items() if p.poll() is None}  # noqa: E731
        until(lambda: set(self.entries()) >= alive(), what="servers", seconds=240)

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the live entries by pid."""
        return {str(e.value["pid"]): e.value for e in self.names.list("llm_server")}

    def make(self, **settings: Any) -> DistributedPublisher:
        settings = {"type": "distributed", "timeout_s": 60.0, "bucket_mb": 0} | settings
        engine: Any = None
        self.publisher = DistributedPublisher(
            publishing(self.folder, self.model, **settings), engine
        )
        return self.publisher

    def publish(self, version: int, name: str, **hooks: Callable[[], None]) -> PublishReport:
        """Publish the weights `name`; call hook `at_5` once, before the fifth tensor."""
        publisher = self.publisher or self.make()
        while publisher.stage(version, self.stream(name, hooks if publisher.shapes else {})):
            self.rounds += 1
        return publisher.push(version)

    def stream(
        self, name: str, hooks: dict[str, Callable[[], None]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (tensor_name, tensor) in enumerate(self.weights[name].items()):
            if hook := hooks.pop(f"at_{number}", None):
                hook()
            yield tensor_name, tensor

    rounds = 0

    def ask(self, pid: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.entries()[pid]["address"] + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def holds(self, pid: str) -> tuple[str, list[int]]:
        """Return the version of a server and its greedy tokens."""
        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True},
        }
        tokens = self.ask(pid, "/generate", body)["output_ids"]
        return self.ask(pid, "/model_info")["weight_version"], tokens

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        for process in self.processes.values():
            process.kill()
            process.wait(60)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "WATCH_S", 0.1)
    for module in (base, control):
        monkeypatch.setattr(module, "CONTINUE_S", 60.0)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start two servers for all tests, because a start is slow."""
    made = Servers(tmp_path_factory.mktemp("pair"))
    made.start(2)
    yield made
    made.close()


@pytest.fixture
def site(pair: Servers) -> Iterator[Servers]:
    """Return the two servers; the test creates its own publisher."""
    pair.publisher, pair.rounds = None, 0
    yield pair
    if pair.publisher is not None:
        pair.publisher.close()


def test_publish_without_servers_fails_when_none_could_still_start(
    empty: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "SERVER_START_S", 0.5)
    empty.make()
    with pytest.raises(RoleError, match=r"no server confirmed version 1 in .* None is registered"):
        empty.publish(1, "a")


def test_mismatched_tensors_are_refused_without_a_request_to_a_server(empty: Servers) -> None:
    empty.weights["a"]["model.norm.weight"] = torch.zeros(7)
    with pytest.raises(UserError, match=r"'model\.norm\.weight' has shape \[7\].*\[32\] in "):
        empty.publish(1, "a")


def test_stage_consumes_all_weights_even_if_it_fails(
    empty: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "SERVER_START_S", 0.5)
    empty.make(timeout_s=0.2)
    assert empty.publisher is not None
    assert empty.publisher.stage(1, empty.stream("a", {}))
    weights = empty.stream("a", {})
    with pytest.raises(RoleError):
        empty.publisher.stage(1, weights)
    assert next(weights, None) is None


def greedy_tokens(folder: Path) -> list[int]:
    """Return the tokens of `holds` by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [5, 6, 7]
    for _ in range(8):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[3:]


def test_two_servers_are_updated_through_one_group(site: Servers) -> None:
    one, other = site.processes
    report = site.publish(1, "a")
    assert (report.servers, report.quarantined, site.rounds) == (2, [], 1), "one look at the names"
    first = site.holds(one)
    assert first[0] == "1" and site.holds(other) == first
    group = site.publisher and site.publisher.group_name
    report = site.publish(2, "b")
    assert site.publisher and site.publisher.group_name == group, "the same servers, the same group"
    assert site.holds(one) == site.holds(other) != first
    assert site.holds(one) == ("2", greedy_tokens(site.folder / "b"))
    assert report.num_bytes == sum(tensor.nbytes for tensor in site.weights["b"].values())
    assert 0 < report.load_s <= report.stall_s and not site.publisher.needs_republish


def test_port_in_use_fails_before_any_server_joins_the_group(site: Servers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        site.make(distributed=DistributedPublisherConfig(port=port))
        with pytest.raises(RoleError, match=f"distributed.port={port} at cluster.host=127.0.0.1"):
            site.publish(1, "a")


class Refuting:
    """A proof that some servers never pass."""

    def __init__(self, *wrong_ids: str) -> None:
        self.wrong_ids = wrong_ids
        self.asked: list[str] = []

    def expect(self, version: int) -> None:
        pass

    def fingerprinted(self, weights: Iterator[Named]) -> Iterator[Named]:
        return weights

    def record(self, version: int) -> str:
        return ""

    async def fault(self, server_id: str, version: int, generate: Generate) -> str:
        self.asked.append(server_id)
        return "other weights" if server_id in self.wrong_ids else ""


def test_server_with_other_weights_is_updated_twice_and_quarantined(site: Servers) -> None:
    first, second = sorted(entry.id for entry in site.names.list("llm_server"))
    publisher = site.make()
    publisher.proof = Refuting(first)
    report = site.publish(7, "b")
    assert report.quarantined == [first]
    publisher.close()
    site.make().proof = refuting = Refuting(first, second)
    with pytest.raises(InvariantError, match="no server generates from version 8"):
        site.publish(8, "b")
    assert sorted(refuting.asked) == [first, first, second, second]


def test_stopped_server_is_quarantined_within_timeout_s_and_republished(site: Servers) -> None:
    stopped, kept = site.processes
    site.make(timeout_s=12.0)  # the other server may be delayed, too
    site.publish(1, "a")
    site.publish(2, "b", at_5=lambda: os.kill(int(stopped), signal.SIGSTOP))
    assert site.holds(kept)[0] == "2"
    os.kill(int(stopped), signal.SIGCONT)
    publisher = site.publisher
    assert publisher is not None
    until(lambda: publisher.needs_republish, what="the server to be back")
    report = site.publish(2, "b")
    assert report.servers == 2
    assert site.holds(stopped) == site.holds(kept)


def test_server_killed_during_an_update_is_replaced_by_a_new_server(site: Servers) -> None:
    lost, kept = site.processes
    site.publish(1, "a")
    report = site.publish(2, "b", at_5=lambda: site.processes[lost].kill())
    assert site.processes[lost].wait(60) == -signal.SIGKILL
    assert report.servers == 1
    version, tokens = site.holds(kept)
    assert version == "2"
    site.publish(3, "b")
    assert site.holds(kept) == ("3", tokens), "it held all of the weights the first time"
    site.start(1)
    publisher = site.publisher
    until(lambda: publisher.needs_republish, what="the newcomer to be found")
    *_, late = site.processes
    report = site.publish(3, "b")
    assert report.servers == 2
    assert site.holds(late) == site.holds(kept)
    assert len(publisher.members) == 1, "a group of the newcomer only"
