"""Adapters of sampling clients: loaded once, kept while they are used, the oldest unloaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from arealite.base.errors import RoleError
from arealite.ext.session.training_session import Session
from arealite.ext.tinker.sampling import LoadedAdapters
from tests.ext.tinker.fake_session import FakeSession


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_text("x")
    return tmp_path


async def use(loaded: LoadedAdapters, name: str, folder: Path) -> None:
    async with loaded.in_use(name, folder):
        await asyncio.sleep(0)


async def test_oldest_unused_adapter_is_unloaded_and_loaded_again(folder: Path) -> None:
    session = FakeSession()
    loaded = LoadedAdapters(cast(Session, session), limit=2)

    for name in ("a", "b", "a", "c", "b"):
        await use(loaded, name, folder)
    await asyncio.sleep(0)

    assert session.calls == ["serve a", "serve b", "serve c", "remove b", "serve b", "remove a"]


async def test_adapter_in_use_stays_beyond_the_limit(folder: Path) -> None:
    session = FakeSession()
    loaded = LoadedAdapters(cast(Session, session), limit=1)

    async with loaded.in_use("a", folder):
        await asyncio.gather(*(use(loaded, name, folder) for name in "bcbc"))
        assert "remove a" not in session.calls
    await asyncio.sleep(0)

    kinds = [call.split()[0] for call in session.calls]
    assert kinds.count("serve") - kinds.count("remove") == 1


async def test_failed_load_is_tried_again_by_the_next_request(folder: Path) -> None:
    session = FakeSession()
    loaded = LoadedAdapters(cast(Session, session), limit=2)
    session.fails_with = RoleError("no server")
    outcomes = await asyncio.gather(
        *(use(loaded, "a", folder) for _ in range(2)), return_exceptions=True
    )
    assert [str(outcome) for outcome in outcomes] == ["no server", "no server"]

    session.fails_with = None
    await use(loaded, "a", folder)

    assert session.calls == ["serve a", "serve a"]


async def test_request_that_is_cancelled_leaves_the_load_to_others(folder: Path) -> None:
    session = FakeSession()
    loaded = LoadedAdapters(cast(Session, session), limit=2)
    first = asyncio.create_task(use(loaded, "a", folder))
    second = asyncio.create_task(use(loaded, "a", folder))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await use(loaded, "b", folder)
    del second

    assert session.calls.count("serve a") == 1
