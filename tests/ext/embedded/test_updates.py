"""Weight updates of the embedded server beyond the contract of all servers (tests/contracts)."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import ClientSession

from arealite.ext.embedded import group_member
from arealite.ext.embedded.embedded_server import EmbeddedServer
from arealite.ext.weights import process_group as groups
from tests.contracts.backends import Backend, Trainer, layouts, trainer_process
from tests.fakes.embedded import embedded, weight_sum
from tests.waiting import eventually

DISTRIBUTED = "/update_weights_from_distributed"


@pytest.fixture
async def instance(folders: list[Path]) -> AsyncIterator[EmbeddedServer]:
    async with embedded(folders[0]) as running:
        yield running


@pytest.fixture
async def server(instance: EmbeddedServer, folders: list[Path]) -> AsyncIterator[Backend]:
    async with ClientSession(instance.address) as session:
        summed = partial(weight_sum, instance)
        backend = Backend(session, [str(folder) for folder in folders], weight_sum=summed)
        await backend.probe()
        yield backend


@pytest.fixture(scope="module")
def trainer() -> Any:
    with trainer_process() as process:
        yield process


async def join(trainer: Trainer, server: Backend) -> None:
    assert (await trainer.join(server))[0] == 200


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"names": ["model.nonsense"]}, "'model.nonsense' [32] is not in the model"),
        ({"shapes": [[16]]}, "has shape [16], but [32] in the model"),
        ({"dtypes": ["int32"]}, "has dtype torch.int32, the model torch.float32"),
        ({"dtypes": ["nonsense"]}, "has no dtype of torch: 'nonsense'"),
        ({"dtypes": ["add"]}, "has no dtype of torch: 'add'"),
        (
            {"names": ["model.norm.weight"] * 2, "dtypes": ["float32"] * 2, "shapes": [[32]] * 2},
            "a name is repeated",
        ),
        ({"shapes": []}, "names, dtypes and shapes differ in length"),
        ({"shapes": [["a"]]}, "Expected `int`"),
    ],
)
async def test_mismatched_tensor_is_refused_before_the_broadcast(
    server: Backend, trainer: Trainer, body: dict[str, Any], text: str
) -> None:
    await join(trainer, server)
    before = await server.checksum()
    right = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]]}
    status, answer = await server.post(DISTRIBUTED, group_name=trainer.group, **(right | body))
    assert status == 400 and text in answer["message"]
    await trainer.leave(server)
    assert await server.checksum() == before


async def test_generation_continues_during_a_broadcast_that_times_out(
    server: Backend, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def join_noted(*args: Any, **options: Any) -> Any:
        made.append(groups.join(*args, **options))
        return made[-1]

    monkeypatch.setattr(group_member, "groups", SimpleNamespace(join=join_noted))
    (layout,) = layouts(server.folders[1])
    body = {"names": layout.names, "dtypes": layout.dtypes, "shapes": layout.shapes}
    before = await server.checksum()
    await join(trainer, server)  # the trainer sends nothing
    update = asyncio.ensure_future(server.post(DISTRIBUTED, group_name=trainer.group, **body))
    server.check(await server.generate(20))
    assert not update.done()
    sent = trainer.command(
        do="send", folder=server.folders[0], names=layout.names, flat=False, server=server
    )
    assert await sent == "done" and (await update)[0] == 200
    assert await server.checksum() == before, "these were its own weights"

    # The timeout is that of the group. Shorten it, so that the test reaches it.
    backend = made[0]._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=group_member.TIMEOUT_S)
    backend._set_default_timeout(timedelta(seconds=0.5))
    async with asyncio.timeout(60):
        status, answer = await server.post(DISTRIBUTED, group_name=trainer.group, **body)
    assert status == 400 and answer["message"].startswith("Failed to receive weights")
    assert (await trainer.leave(server))[0] == 200
    assert await server.checksum() == before


async def test_group_times_out_if_its_trainer_never_connects(
    server: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, go_on = threading.Event(), threading.Event()

    def join_later(*args: Any, **options: Any) -> Any:
        tries.set()
        assert go_on.wait(60)
        return groups.join(*args, **options)

    monkeypatch.setattr(group_member, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(group_member, "groups", SimpleNamespace(join=join_later))
    with socket.socket() as silent_socket:
        silent_socket.bind(("127.0.0.1", 0))  # bound but not listening
        body = {"master_address": "127.0.0.1", "master_port": silent_socket.getsockname()[1]}
        body |= {"rank_offset": 1, "world_size": 2, "group_name": "lonely", "backend": "gloo"}
        path = "/init_weights_update_group"
        async with asyncio.timeout(60):
            first = asyncio.ensure_future(server.post(path, **body))
            await eventually(tries.is_set, "a join")
            await server.generate(1)
            second = await server.post(path, **body)
            go_on.set()
            status, answer = await first
    assert status == 400 and "Failed to initialize custom process group" in answer["message"]
    assert second[0] == 400 and "has already been created" in second[1]["message"]


async def test_server_exits_during_a_broadcast(folders: list[Path]) -> None:
    (layout,) = layouts(str(folders[1]))
    body = {"names": layout.names, "dtypes": layout.dtypes, "shapes": layout.shapes}
    with trainer_process() as silent:
        async with asyncio.timeout(60):
            async with embedded(folders[0]) as running, ClientSession(running.address) as session:
                server = Backend(session, [str(folder) for folder in folders])
                await server.probe()
                await join(silent, server)
                hanging = server.post(DISTRIBUTED, group_name=silent.group, **body)
                update = asyncio.ensure_future(hanging)
                await server.generate(2)
            await asyncio.wait((update,))
    assert update.exception() is not None
