"""Adapters by name at SGLang and vLLM, where each version has a name of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import arealite
from arealite.base.errors import RoleError, UserError
from arealite.ext.session import adapter_publisher
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.server_kinds import kind as kind
from tests.waiting import eventually

PROMPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_publisher, "WATCH_S", 0.02)


@asynccontextmanager
async def session_at(
    server: Any, model: Path, options: dict[str, Any], **arguments: Any
) -> AsyncIterator[arealite.Session]:
    """Open a session whose only server is a fake one, whose log-probabilities prove nothing."""
    threads = torch.get_num_threads()
    try:
        async with arealite.session(
            model,
            addresses=[server.url.removeprefix("http://")],
            **arguments,
            overrides=options | {"publisher.canary": False},
        ) as session:
            yield session
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
async def server(model: Path, kind: type[ScriptedServer]) -> AsyncIterator[Any]:
    async with kind(model_path=str(model)) as server:  # type: ignore[abstract]
        server.adapters.max_rank = 32  # type: ignore[attr-defined]
        server.context_length = 512
        server.next_token = lambda tokens: 3 + len(tokens)
        yield server


def loaded(server: Any) -> set[str]:
    return {*server.adapters.content_of_name}


def forget(server: Any) -> None:
    """Forget the requests so far."""
    server.requests.clear()
    server.calls.clear()


async def test_versions_have_names_and_their_tokens_their_versions(
    server: Any, model: Path, options: dict[str, Any]
) -> None:
    async with session_at(server, model, options, adapters=("alice", "bob")) as session:
        assert loaded(server) == {"alice@0", "bob@0"}
        await session.publish(adapter="alice")
        assert loaded(server) == {"alice@1", "bob@0"}
        forget(server)
        (alice,) = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        (bob,) = await session.sample(PROMPT, max_tokens=4, adapter="bob")
        (base,) = await session.sample(PROMPT, max_tokens=4)
        assert (alice.versions, bob.versions, base.versions) == ([1] * 4, [0] * 4, [0] * 4)
        assert [sent.adapter for sent in server.requests] == ["alice@1", "bob@0", ""]
        await session.remove_adapter("bob")
        assert loaded(server) == {"alice@1"}
    assert loaded(server) == set(), "the server continues to run without the session's adapters"


async def test_publish_interrupts_only_the_answers_of_its_adapter(
    server: Any, model: Path, options: dict[str, Any]
) -> None:
    async with session_at(server, model, options, adapters=("alice", "bob")) as session:
        forget(server)
        server.hold_after = 2
        sampling = [session.sample(PROMPT, max_tokens=5, adapter=name) for name in ("alice", "bob")]
        await server.held(2)
        await session.publish(adapter="alice")
        server.release()
        ((alice,), (bob,)) = [await samples for samples in sampling]
        assert alice.versions == [0, 0, 1, 1, 1]
        assert bob.versions == [0] * 5
        named = [sent.adapter for sent in server.requests]
        assert named.count("bob@0") == 1 and named[-1] == "alice@1"
        assert not any(body.get("abort_all") for _, body in server.calls)


async def test_default_adapter_and_named_ones_have_names_of_their_own(
    server: Any, model: Path, options: dict[str, Any]
) -> None:
    async with session_at(server, model, options, lora=4, adapters=("alice",)) as session:
        await session.publish()
        await session.publish(adapter="alice")
        await session.publish()
        assert loaded(server) == {"policy-2", "alice@1"}
        forget(server)
        (default,) = await session.sample(PROMPT, max_tokens=4)
        (alice,) = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        assert (default.versions, alice.versions) == ([2] * 4, [1] * 4)
        assert [sent.adapter for sent in server.requests] == ["policy-2", "alice@1"]


async def test_restarted_server_gets_the_newest_versions(
    server: Any, model: Path, options: dict[str, Any]
) -> None:
    async with session_at(server, model, options, adapters=("alice",)) as session:
        await session.publish(adapter="alice")
        await server.restart()
        await eventually(lambda: loaded(server) == {"alice@1"})
        (sample,) = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        assert sample.versions == [1] * 4


async def test_adapter_of_an_earlier_session_is_replaced(
    server: Any, model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    server.adapters.content_of_name |= {"alice@0": "other weights", "alice@7": "other weights"}
    server.adapters.path_of_name |= dict.fromkeys(("alice@0", "alice@7"), str(tmp_path))
    async with session_at(server, model, options, adapters=("alice",)) as session:
        assert loaded(server) == {"alice@0"}
        assert server.adapters.content_of_name["alice@0"] != "other weights"
        (sample,) = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        assert sample.versions == [0] * 4


async def test_served_folder_that_changed_has_another_name_and_path(
    server: Any, model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    """vLLM finds cached prefixes of an adapter by its name and its path."""
    folder = tmp_path / "adapter"
    async with session_at(server, model, options, adapters=("alice",)) as session:
        with pytest.raises(UserError, match=r"serve: .* has no adapter_config.json"):
            session.serve("theirs", folder)
        await session.export(folder, adapter="alice")
        served = set[tuple[str, str]]()
        for version in range(2):
            await session.serve("theirs", folder)
            (sample,) = await session.sample(PROMPT, max_tokens=4, adapter="theirs")
            assert sample.versions == [version] * 4
            served |= {*server.adapters.path_of_name.items()}
            await session.remove_adapter("theirs")
        names = [name for name, _ in served if name.startswith("theirs")]
        paths = {path for name, path in served if name.startswith("theirs")}
        assert sorted(names) == ["theirs@0", "theirs@1"] and len(paths) == 2
    assert not any(map(os.path.lexists, paths)), "links of the session remain"
    assert folder.exists()


async def test_refused_adapter_is_an_error_of_its_publish(
    server: Any, model: Path, options: dict[str, Any]
) -> None:
    async with session_at(server, model, options, adapters=("alice",)) as session:
        with pytest.raises(RoleError, match=r"rank 64 is greater than max_lora_rank 32"):
            await session.add_adapter("bob", rank=64)
        (sample,) = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        assert sample.versions == [0] * 4


async def test_server_without_adapters_is_one_line(
    model: Path, options: dict[str, Any], kind: type[ScriptedServer]
) -> None:
    async with kind(model_path=str(model)) as server:  # type: ignore[abstract]
        server.context_length = 512
        with pytest.raises(UserError, match="start it with adapters") as refusal:
            async with session_at(server, model, options, adapters=("alice",)):
                pass
        assert "\n" not in str(refusal.value)
