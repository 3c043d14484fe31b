"""One server of each kind, behind the two classes that hide what differs between kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from arealite.api.llm import SamplingConfig
from arealite.api.server_protocol import (
    GenerateRequest,
    Json,
    ServerAnswer,
    ServerDescription,
    ServerProtocol,
    part_of_entry,
)
from arealite.impl.http_client import OnData, Pool, ServerEndpoint
from arealite.impl.publisher.control import ServerControl

PROMPT = [5, 6, 7, 8]
LONG = 400
"""Tokens of a generation that still runs when a test acts."""


@dataclass(kw_only=True)
class KindOfServer:
    """A server under test."""

    address: str
    name: str
    """The registered name of its protocol."""
    folders: list[str]
    """Model folders of one shape; the server starts with the first."""
    pool: Pool
    headers: dict[str, str] = field(default_factory=dict[str, str])
    hold: Callable[[], object] = lambda: None
    """Blocks generations after their first tokens; SGLang needs none: LONG is long."""
    release: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        entry = {"address": self.address, "protocol": self.name}
        self.protocol: ServerProtocol = part_of_entry("server_protocol", entry)()
        control_type: type[ServerControl] = part_of_entry("server_control", entry)
        self.control = control_type(
            id="s",
            address=self.address,
            pool=self.pool,
            protocol=self.protocol,
            folder=self.folders[0],
            headers=self.headers,
        )

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self.pool.request(self.address + path, self.headers)

    async def post(self, path: str, body: Json) -> tuple[int, bytes]:
        return await self.pool.request(self.address + path, self.headers, body)

    async def describe(self, protocol: ServerProtocol) -> ServerDescription | None:
        """Return what the server says of itself in a protocol, perhaps that of another kind."""
        answers: dict[str, Json] = {}
        for path in protocol.describe_paths:
            status, raw = await self.get(path)
            answers[path] = msgspec.json.decode(raw) if status == 200 else {}
        return protocol.describe(answers)

    async def version(self) -> str:
        _, raw = await self.get(self.protocol.version_path)
        return str(self.protocol.read_version(raw))

    async def send(
        self, request: GenerateRequest, on_data: OnData | None = None
    ) -> tuple[int, bytes]:
        endpoint = ServerEndpoint(self.address + self.protocol.generate_path, self.headers)
        return await self.pool.send(endpoint, self.protocol.encode_request(request), on_data)

    async def generate(self, num_tokens: int = 6, **fields: Any) -> ServerAnswer:
        """Generate tokens; `fields` are those of `GenerateRequest`."""
        status, raw = await self.send(request(num_tokens, **fields))
        assert status == 200, raw
        return self.protocol.decode_answer(raw)

    async def begun(self, rid: str) -> asyncio.Task[ServerAnswer]:
        """Begin a long generation; return it once it runs."""
        self.hold()
        task = asyncio.create_task(self.generate(LONG, rid=rid))
        async with asyncio.timeout(60):
            while await self.num_running() < 1:
                assert not task.done(), task
        return task

    async def num_running(self) -> int:
        _, raw = await self.get(self.protocol.load_path)
        load = self.protocol.read_load(raw)
        assert load is not None, raw
        return load["running"]

    async def update(self, mode: str, folder: str, version: int) -> None:
        """Pause the server, load a folder, and continue, as a publisher does."""
        await self.control.pause(mode)
        await self.control.load_folder(Path(folder), version)
        self.release()
        await self.control.finish(version)


def request(num_tokens: int, *, rid: str = "r~0", **fields: Any) -> GenerateRequest:
    """Return a request that ignores the model's end tokens."""
    sampling = {"max_new_tokens": num_tokens} | fields.pop("sampling", {})
    values = {"input_ids": PROMPT, "ignore_eos": True} | fields
    return GenerateRequest(rid=rid, sampling=SamplingConfig(**sampling), **values)
