"""Tensors in request bodies: pickles for SGLang, safetensors for our own server."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import pytest
import torch
from safetensors.torch import load

from arealite.impl.publisher.tensor import TensorPublisher
from tests.fakes.sglang import FakeSGLang
from tests.impl.publisher.sites import Site, servers
from tests.waiting import eventually

PATH = "/update_weights_from_tensor"


@pytest.fixture(autouse=True)
def tensor_site(site: Site) -> None:
    site.kind = TensorPublisher


def bodies(server: FakeSGLang) -> list[dict[str, Any]]:
    return [body for path, body in server.calls if path == PATH]


def decoded(body: dict[str, Any]) -> bytes:
    (entry,) = body["serialized_named_tensors"]
    return base64.b64decode(entry)


async def test_sglang_gets_a_pickle_of_cpu_tensors(site: Site) -> None:
    async with servers(site, 1) as (server,):
        report = await site.publish(3, 2.0)
        (body,) = bodies(server)
        named = pickle.loads(decoded(body))
        assert [name for name, _ in named] == ["a.weight", "b.weight"]
        assert torch.equal(named[0][1], torch.full((2, 3), 2.0))
        assert (body["weight_version"], body["flush_cache"]) == ("3", True)
        assert (server.version, server.paused, server.weights.session) == ("3", None, False)
        assert (report.servers, report.num_bytes) == (1, 44)


async def test_our_own_server_gets_safetensors(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.tensor = "safetensors"
        await site.publish(1, 2.0)
        assert load(decoded(bodies(server)[0]))["b.weight"].tolist() == [-2.0] * 5


async def test_version_and_flush_come_with_the_last_bucket(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(1, bucket_mb=0)
        told = [(body["weight_version"], body["flush_cache"]) for body in bodies(server)]
        assert told == [(None, False), ("1", True)]
        order = [path for path, _ in server.calls]
        assert order[-8:-1] == [
            *("/pause_generation", "/end_weight_update", "/begin_weight_update", PATH, PATH),
            *("/end_weight_update", "/continue_generation"),
        ]


async def test_an_old_server_has_no_sessions(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.sessions = False
        await site.publish(1)
        assert server.version == "1"
        assert not [path for path, _ in server.calls if "begin" in path]


async def test_a_session_whose_end_was_not_heard_is_ended(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(1)
        server.weights.session = True
        await site.publish(2)
        assert (server.version, server.weights.session) == ("2", False)


async def test_in_place_never_flushes(site: Site) -> None:
    async with servers(site, 1) as (server,):
        await site.publish(1, pause_mode="in_place")
        assert bodies(server)[0]["flush_cache"] is False


async def test_a_server_that_takes_no_tensors_is_refused_before_a_pause(site: Site) -> None:
    async with servers(site, 1) as (server,):
        server.tensor = None
        await site.refused(1, site.quarantined, r"takes no tensors; use publisher\.type=disk")
        assert "/pause_generation" not in [path for path, _ in server.calls]


async def test_half_an_update_generates_under_no_version(site: Site) -> None:
    async with servers(site, 2) as (good, bad):
        await site.publish(1, bucket_mb=0)
        bad.fail_next("500", count=1000, path=PATH)
        report = await site.publish(2)
        assert (good.version, report.servers) == ("2", 1)
        paths = [path for path, _ in bad.calls]
        first = paths.index("/update_weight_version")
        assert bad.calls[first][1]["new_version"] == "-1"
        assert paths[first - 2 : first + 2] == [
            *(PATH, "/end_weight_update", "/update_weight_version", "/continue_generation")
        ]
        bad.recover()
        await eventually(lambda: bad.version == "2" and bad.paused is None)
