"""Wrong input of a session is one error before a process starts; running servers are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import arealite
from arealite.base.errors import UserError
from tests.ext.session.conftest import Open
from tests.fakes.embedded import running, server_config

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "/no/such/folder"}, "no/such/folder"),
    ({"servers": -1}, "launcher.llm_servers"),
    ({"servers": 0}, "no language-model server .* Start one"),
    ({"lora": -1}, "lora.rank"),
    ({"lora": 2, "overrides": {"engine.fsdp.lora.targets": ["no_layer"]}}, "no_layer"),
    ({"max_staleness": -1}, "max_staleness"),
    ({"trial": "a/b"}, "trial_name='a/b'"),
    ({"addresses": ["127.0.0.1:1"]}, "127.0.0.1:1"),
    ({"overrides": {"engine.fsdp.dtyp": "bfloat16"}}, "trainer.ppo.engine.fsdp.dtyp"),
    ({"overrides": {"engine.fsdp.dtype": "int8"}}, "trainer.ppo.engine.fsdp.dtype"),
    ({"overrides": "lr=1"}, "use a dict"),
    ({"overrides": {"publisher.type": "shared"}}, "publisher.type=shared"),
    ({"overrides": {"publisher.type": "distributed"}}, "publisher.type=distributed"),
    ({"overrides": {"advantage.type": "x"}}, "Unknown advantage"),
]


@pytest.mark.parametrize(("arguments", "error"), REFUSED)
async def test_wrong_input_is_one_error_before_anything_starts(
    arguments: dict[str, Any], error: str, model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    before = psutil.Process().children(recursive=True)
    overrides = arguments.get("overrides", {})
    if isinstance(overrides, dict):
        overrides = {**options, "server_wait_s": 0.1, **overrides}
    everything = {"model": model, **arguments, "overrides": overrides}
    with pytest.raises(UserError, match=error):
        await arealite.session(**everything)
    assert psutil.Process().children(recursive=True) == before
    assert not torch.distributed.is_initialized()


async def test_running_servers_are_used_and_stay(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    threads = torch.get_num_threads()
    async with running(server_config(model, tmp_path / "elsewhere")) as server:
        address = server.address.removeprefix("http://")
        arguments: dict[str, Any] = {"addresses": [address], "overrides": options}
        async with arealite.session(model, **arguments) as session:
            samples = await session.sample("2+3=", n=2, max_tokens=4)
            await session.publish()
            newer = await session.sample("2+3=", n=2, max_tokens=4)
        assert server.engine.version == "1"
    torch.set_num_threads(threads)
    assert {version for sample in samples for version in sample.versions} == {0}
    assert {version for sample in newer for version in sample.versions} == {1}


async def test_call_before_the_start_and_after_the_end_is_refused(
    model: Path, opened: Open
) -> None:
    with pytest.raises(UserError, match="the session is not running"):
        arealite.session(model).sample("2+3=")
    async with opened() as parts:
        pass
    with pytest.raises(UserError, match="the session is not running"):
        parts.session.optim_step()
