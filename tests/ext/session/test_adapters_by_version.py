"""Adapters by name at SGLang and vLLM, where each version has a name of its own."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import arealite
from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.ext.session import adapter_publisher, adapter_server
from arealite.ext.session.adapter_server import (
    AdapterRefused,
    AdapterServer,
    NamedVersionServer,
    StagedAdapter,
)
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.server_kinds import kind as kind
from tests.impl.publisher.sites import paths
from tests.waiting import eventually

PROMPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_publisher, "WATCH_S", 0.02)


@asynccontextmanager
async def session_at(
    server: Any, model: Path, options: dict[str, Any], *, canary: bool = False, **arguments: Any
) -> AsyncIterator[arealite.Session]:
    """Open a session whose only server is a fake one, whose log-probabilities prove nothing."""
    threads = torch.get_num_threads()
    try:
        async with arealite.session(
            model,
            addresses=[server.url.removeprefix("http://")],
            **arguments,
            overrides=options | {"publisher.canary": canary},
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


async def test_adapter_of_an_earlier_session_is_neither_sampled_nor_kept(
    server: Any, model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    async with session_at(server, model, options, adapters=("bob",)) as session:
        for name in ("alice@0", "alice@7"):  # at a server that joins later, they may be there
            server.adapters.content_of_name[name] = "other weights"
            server.adapters.path_of_name[name] = str(tmp_path)
        added = session.add_adapter("alice")
        (sample,) = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        await added
        assert sample.versions == [0] * 4
        assert loaded(server) == {"alice@0", "bob@0"}
        assert server.adapters.content_of_name["alice@0"] != "other weights"


async def test_version_is_sampled_only_after_its_proof(
    server: Any, model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the proof runs and after it has failed, no request names the new version."""
    is_proving, may_fail = threading.Event(), threading.Event()

    async def prove(server: AdapterServer, adapter: StagedAdapter, name: str) -> None:
        if adapter.version == 1:
            is_proving.set()
            await asyncio.to_thread(may_fail.wait)
            raise AdapterRefused("other log-probabilities")

    monkeypatch.setattr(AdapterServer, "_prove", prove)
    async with session_at(server, model, options, adapters=("alice",)) as session:
        forget(server)
        server.hold_after = 2
        sampling = session.sample(PROMPT, max_tokens=4, adapter="alice")
        await server.held(1)
        publishing = session.publish(adapter="alice")
        await asyncio.to_thread(is_proving.wait)
        assert loaded(server) == {"alice@0", "alice@1"}
        server.release()
        samples = [*await sampling, *await session.sample(PROMPT, max_tokens=4, adapter="alice")]
        may_fail.set()
        with pytest.raises(RoleError, match="other log-probabilities"):
            await publishing
        samples += await session.sample(PROMPT, max_tokens=4, adapter="alice")
        assert [sample.versions for sample in samples] == [[0] * 4] * 3
        assert [sent.adapter for sent in server.requests] == ["alice@0"] * 3
        assert loaded(server) == {"alice@0"}


@pytest.mark.parametrize("error", [InvariantError("no numbers"), msgspec.DecodeError("no JSON")])
async def test_scores_that_are_no_numbers_refuse_a_version(
    server: Any, model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    async with session_at(server, model, options, canary=True, adapters=("alice",)) as session:

        async def scores(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(adapter_server, "read_scores", scores)
        with pytest.raises(RoleError, match=str(error)):
            await session.publish(adapter="alice")
        assert loaded(server) == {"alice@0"}
        (sample,) = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        assert sample.versions == [0] * 4


async def test_session_survives_what_a_restarted_server_answers(
    server: Any, model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with session_at(server, model, options, adapters=("alice",)) as session:
        num_failures = 0
        load = NamedVersionServer._load

        async def fail_twice(server: NamedVersionServer, adapter: StagedAdapter) -> None:
            nonlocal num_failures
            num_failures += 1
            if num_failures < 3:
                raise ValueError("unexpected")
            await load(server, adapter)

        monkeypatch.setattr(NamedVersionServer, "_load", fail_twice)
        await server.restart()
        (sample,) = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        assert sample.versions == [0] * 4 and num_failures == 3


async def test_refused_version_disturbs_no_answer_and_is_removed_with_its_adapter(
    server: Any, model: Path, options: dict[str, Any]
) -> None:
    async with session_at(server, model, options, adapters=("alice", "bob")) as session:
        forget(server)
        server.hold_after = 2
        sampling = session.sample(PROMPT, max_tokens=4, adapter="alice")
        await server.held(1)
        server.adapters.max_rank = 4
        with pytest.raises(RoleError, match="rank 32 is greater than max_lora_rank 4"):
            await session.publish(adapter="alice")
        server.adapters.max_rank = 32
        await session.publish(adapter="bob")
        server.release()
        (sample,) = await sampling
        assert sample.versions == [0] * 4
        assert [sent.adapter for sent in server.requests] == ["alice@0"]
        await session.remove_adapter("alice")
        assert loaded(server) == {"bob@1"}


async def test_restarted_server_gets_base_weights_and_then_the_adapters(
    server: Any, model: Path, options: dict[str, Any]
) -> None:
    async with session_at(server, model, options, adapters=("alice",)) as session:
        forget(server)
        await server.restart()
        await eventually(lambda: server.load_path in paths(server), "base weights")
        (sample,) = await session.sample(PROMPT, max_tokens=4, adapter="alice")
        assert sample.versions == [0] * 4
        loads = [path for path in paths(server) if "load" in path and "unload" not in path]
        assert "load_lora_adapter" in loads[-1]


async def test_model_path_with_the_mark_of_versions(
    model: Path, options: dict[str, Any], kind: type[ScriptedServer], tmp_path: Path
) -> None:
    """SGLang lists its model by its path, beside the adapters."""
    marked = tmp_path / "user@7" / "model"
    shutil.copytree(model, marked)
    async with kind(model_path=str(marked)) as server:  # type: ignore[abstract]
        server.adapters.max_rank = 32  # type: ignore[attr-defined]
        server.context_length = 512
        async with session_at(server, marked, options, adapters=("alice",)):
            assert loaded(server) == {"alice@0"}


async def test_served_adapter_gets_another_name_each_time(
    server: Any, model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    """Its folder may have changed, and vLLM finds cached prefixes by name and path."""
    folder = tmp_path / "adapter"
    async with session_at(server, model, options, adapters=("alice",)) as session:
        with pytest.raises(UserError, match=r"serve: .* has no adapter_config.json"):
            session.serve("theirs", folder)
        await session.export(folder, adapter="alice")
        for name in ("a/b", "up@3", ""):
            with pytest.raises(UserError, match="use letters, digits"):
                session.serve(name, folder)
        for version in range(2):
            await session.serve("their.one", folder)
            assert loaded(server) == {"alice@0", f"their.one@{version}"}
            (sample,) = await session.sample(PROMPT, max_tokens=4, adapter="their.one")
            assert sample.versions == [version] * 4
            await session.remove_adapter("their.one")
        assert loaded(server) == {"alice@0"}


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
