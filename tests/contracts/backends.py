"""Backends with one interface to each server under test, and a trainer that sends weights."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from safetensors.torch import load_file

from arealite.ext.weights.buckets import Layout, pack

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [5, 6, 7, 8]
LONG = 480


@dataclass
class Backend:
    """A server under test, and a session on it."""

    session: aiohttp.ClientSession
    folders: list[str]
    """Model folders of one shape; the server starts with the first."""
    is_scripted: bool = False
    """Whether the server is scripted and ignores received weights."""
    is_streaming: bool = True
    """Whether the server streams; otherwise `streaming` waits until the request is running."""
    api: dict[str, Any] = field(default_factory=dict)
    spans: bool = True
    """Whether the server reports the version of each token."""
    hold: Callable[[], None] | None = None
    """Blocks generations after their first tokens until `release`; None for a real SGLang."""
    release: Callable[[], None] = lambda: None
    weight_sum: Callable[[], str] | None = None
    """Returns a checksum of all weights without a request; None: request it from the server."""

    async def probe(self) -> None:
        """Detect the capabilities of the server from its OpenAPI description and one token."""
        self.api = (await self.get("/openapi.json"))[1]
        self.spans = "weight_versions" in (await self.generate(1))["meta_info"]
        await self.flush()

    def has(self, path: str) -> bool:
        """Return whether the server has the route."""
        return path in self.api["paths"]

    @property
    def is_old_sglang(self) -> bool:
        """Return whether invalid requests can crash the server: a real SGLang without sessions."""
        return self.is_streaming and not self.has("/begin_weight_update")

    def fields(self, body: str) -> dict[str, Any]:
        """Return the fields of a request body in the OpenAPI description."""
        return self.api["components"]["schemas"][body]["properties"]

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(path, json=body) as response:
            raw = await response.read()
            try:
                return response.status, json.loads(raw or b"null")
            except json.JSONDecodeError:
                return response.status, raw.decode()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as response:
            raw = await response.read()
            return response.status, json.loads(raw or b"null")

    async def generate(self, new: int = 6, **body: Any) -> dict[str, Any]:
        status, answer = await self.try_generate(new, **body)
        assert status == 200, answer
        return answer

    async def try_generate(self, new: int = 6, **body: Any) -> tuple[int, Any]:
        sampling = {"max_new_tokens": new, "ignore_eos": True} | body.pop("sampling", {})
        body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling} | body
        return await self.post("/generate", **body)

    async def streaming(
        self, rid: str | None = None, new: int = LONG
    ) -> tuple[asyncio.Task, list[dict]]:
        """Start a long generation; return when it has first tokens and is blocked.

        The list receives the streamed events or the answer. A rid must be new, because SGLang
        aborts it again 2 s after a stream has ended.
        """
        events: list[dict] = []
        started = asyncio.Event()
        if self.hold is not None:
            self.hold()

        before = 0 if self.is_streaming else await self.running()

        async def read() -> None:
            if not self.is_streaming:
                events.append(await self.generate(new, rid=rid))
                return
            body = {
                "input_ids": PROMPT,
                "rid": rid or uuid.uuid4().hex,
                "stream": True,
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": new, "ignore_eos": True},
            }
            async with self.session.post("/generate", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        events.append(json.loads(line[6:]))
                        started.set()

        task = asyncio.ensure_future(read())
        async with asyncio.timeout(60):
            while not self.is_streaming and await self.running() == before:
                pass
            if self.is_streaming:
                await started.wait()
        return task, events

    async def crowded(self) -> tuple[asyncio.Task, list[dict], asyncio.Future]:
        """Start a generation among others that slow it down, so that it is still running later;
        the third value awaits the answers of the others."""
        if self.hold is not None:
            self.hold()
        crowd = asyncio.gather(*(self.generate(LONG) for _ in range(24)))
        async with asyncio.timeout(60):
            while self.hold is not None and await self.running() < 24:
                pass
        return *(await self.streaming()), crowd

    async def running(self) -> int:
        """Return the reported number of running requests."""
        (load,) = (await self.get("/v1/loads"))[1]["loads"]
        return load["num_running_reqs"]

    async def version(self) -> str:
        """Return the version that the server reports."""
        return (await self.get("/model_info"))[1]["weight_version"]

    async def checksum(self) -> str:
        """Return a checksum of all weights; "" if the server has no checksums."""
        if self.weight_sum is not None:
            return self.weight_sum()
        status, answer = await self.post("/weights_checker", action="checksum")
        if status in (404, 405) or "Unsupported action" in str(answer):
            return ""
        assert status == 200 and answer["success"], answer
        assert answer["ranks"][0]["checksums"]
        return answer["per_engine_checksum"]

    async def flush(self) -> None:
        """Flush the cache; retry, because SGLang may still count a finished request."""
        async with asyncio.timeout(60):
            while (await self.post("/flush_cache"))[0] != 200:
                pass

    async def load(self, number: int, **body: Any) -> tuple[int, Any]:
        """Load the weights of a folder from disk; retry after an early flush (see `flush`)."""
        body["model_path"] = self.folders[number]
        status, answer = await self.post("/update_weights_from_disk", **body)
        if status == 400 and "not flushed" in answer["message"]:
            await self.flush()
            status, answer = await self.post("/update_weights_from_disk", **body)
        return status, answer

    async def begin(self) -> None:
        """Open an update session if the server has sessions."""
        if self.has("/begin_weight_update"):
            status, answer = await self.post("/begin_weight_update")
            assert status == 200 and answer["success"], answer

    async def end(self) -> None:
        """Close the update session."""
        if self.has("/end_weight_update"):
            status, answer = await self.post("/end_weight_update")
            assert status == 200 and answer["success"], answer

    def versions(self, answer: dict[str, Any]) -> list[str]:
        """Return the versions of an answer's tokens, in order, each once."""
        meta = answer["meta_info"]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
        return [span["version"] for span in spans]

    def check(self, answer: dict[str, Any]) -> None:
        """Check an answer: equal lengths, and spans that cover the output."""
        meta, ids = answer["meta_info"], answer["output_ids"]
        pairs = meta["output_token_logprobs"]
        assert [token for _, token, _ in pairs] == ids
        assert all(logprob <= 0 for logprob, _, _ in pairs)
        assert meta["completion_tokens"] == len(ids)
        if self.spans and meta["finish_reason"] is not None:
            covered = [i for s in meta["weight_versions"] for i in range(s["start"], s["end"])]
            assert covered == list(range(len(ids)))


def retractions(answer: dict[str, Any]) -> int:
    """Return the number of retractions of a request; SGLang 0.5.9 uses another field."""
    meta = answer["meta_info"]
    return meta["num_retractions"] if "num_retractions" in meta else meta["total_retractions"]


def layouts(folder: str, max_bytes: int = 2**30) -> list[Layout]:
    """Describe a model's tensors, in buckets."""
    weights = load_file(f"{folder}/model.safetensors")
    return [bucket.layout for bucket in pack(weights.items(), max_bytes)]


def num_bytes(folder: str) -> int:
    """Return the size of a model's weights."""
    return sum(layout.num_bytes for layout in layouts(folder))


class Trainer:
    """Rank 0 of a process group with one server, in another process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.group = ""

    async def join(self, server: Backend, name: str | None = None) -> tuple[int, Any]:
        """Create a group with the server; return the server's answer."""
        self.group = name or f"group-{uuid.uuid4().hex[:8]}"
        port = await self.command(do="listen", server=server)
        where = {"master_address": "127.0.0.1", "master_port": port, "group_name": self.group}
        init = {"rank_offset": 1, "world_size": 2, "backend": "gloo"} | where
        made = self.command(do="join", name=self.group, server=server)
        answer, told = await asyncio.gather(server.post("/init_weights_update_group", **init), made)
        assert told == "done"
        return answer

    async def update(
        self, server: Backend, folder: str, layout: Layout, *, flat: bool = False, **body: Any
    ) -> tuple[int, Any]:
        """Send a folder's tensors; return the server's answer."""
        names = {"names": layout.names, "dtypes": layout.dtypes, "shapes": layout.shapes}
        body |= names | {"group_name": self.group}
        if flat:
            body["load_format"] = "flattened_bucket"
        sent = self.command(do="send", folder=folder, names=layout.names, flat=flat, server=server)
        answer, told = await asyncio.gather(
            server.post("/update_weights_from_distributed", **body), sent
        )
        assert told == "done"
        return answer

    async def leave(self, server: Backend) -> tuple[int, Any]:
        """Destroy the group on both sides; return the server's answer."""
        answer = await server.post("/destroy_weights_update_group", group_name=self.group)
        assert await self.command(do="leave", server=server) == "done"
        return answer

    async def command(self, *, server: Backend, **command: Any) -> Any:
        """Run a command in the process, except with a scripted server, which has no group."""
        return "done" if server.is_scripted else await asyncio.to_thread(self._command, command)

    def _command(self, command: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline() or b'"it died"')


@contextmanager
def trainer_process() -> Iterator[Trainer]:
    """Run the trainer process until the body ends."""
    command = [sys.executable, "-m", "tests.contracts.trainer_side"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b'"ready"\n'
            yield Trainer(process)
        finally:
            process.kill()
