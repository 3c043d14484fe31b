"""Records what a client sends to a gateway, as a small corpus; and replays a corpus.

A corpus is JSON lines. The first line describes it. Each further line is one request: its path, its
body, the ids in its answer, and the model's reply. Fields that are as in the body before are left
out. The list of messages is {"kept": items of the body before, "new": further items}.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

CORPORA = Path(__file__).parent / "corpora"
LISTS = ("messages", "input")
LONGEST = 400
"""Characters of the longest text in a corpus; longer ones are cut."""
TOOLS = 3
"""Tools of a body in a corpus."""
ID = re.compile(rb'"(?:id|call_id)": ?"([^"]{6,})"')
OTHERS = ("rs_", "fc_", "msg_", "chatcmpl-", "resp_")
"""Beginnings of the ids of parts of an answer: not every chat family has every part."""
UNSTABLE = re.compile(
    r"/tmp/[^\s\"'<>]+|\d{4}-\d\d-\d\d|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
)


def ids_of(body: bytes) -> list[str]:
    """Return the ids of an answer, streamed or not, and of its calls: each once, in order."""
    found = [*dict.fromkeys(found.decode() for found in ID.findall(body))]
    return found[:1] + [each for each in found[1:] if not each.startswith(OTHERS)]


def small(value: Any) -> Any:
    """Return JSON without long texts, paths, dates and random ids of the client."""
    if isinstance(value, str):
        text = UNSTABLE.sub("X", value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    if isinstance(value, list):
        return [small(each) for each in value]
    if isinstance(value, dict):
        return {key: small(each) for key, each in value.items()}
    return value


class Recorder:
    """A reverse proxy of one session that keeps its requests and the ids of its answers."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.requests: list[dict[str, Any]] = []

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Forward a request, and its answer as it comes."""
        body = await request.read()
        names = ("Host", "Content-Length", "Accept-Encoding", "Connection")
        headers = {k: v for k, v in request.headers.items() if k.title() not in names}
        url, answered = f"{self.target}{request.path_qs}", bytearray()
        made: dict[str, Any] = {"path": request.path}
        async with self.http.request(request.method, url, data=body, headers=headers) as answer:
            if request.method == "POST" and answer.status == 200:
                made |= {"body": json.loads(body), "ids": answered}
                self.requests.append(made)
            kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            response = web.StreamResponse(status=answer.status, headers=kind)
            await response.prepare(request)
            async for data in answer.content.iter_any():
                answered += data
                await response.write(data)
            with suppress(ConnectionError):  # some clients leave after the last event
                await response.write_eof()
        return response

    def write(self, path: Path, about: dict[str, Any], replies: list[Any]) -> None:
        """Write the corpus."""
        lines, before = [about], dict[str, Any]()
        for index, request in enumerate(self.requests):
            body = small(request["body"])
            body |= {"tools": body["tools"][:TOOLS]} if "tools" in body else {}
            packed = {key: value for key, value in body.items() if before.get(key) != value}
            for name in LISTS:
                if isinstance(items := packed.get(name), list):
                    pairs = zip(before.get(name, []), items, strict=False)
                    kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                    packed[name] = {"kept": kept, "new": items[kept:]}
            before = body
            reply = replies[index] if index < len(replies) else None
            made = {"body": packed, "ids": ids_of(request["ids"]), "reply": reply}
            lines.append(request | made)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")


@asynccontextmanager
async def recording(target: str) -> AsyncIterator[Recorder]:
    """Run a recorder on a free loopback port."""
    recorder = Recorder(target)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", recorder.serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(auto_decompress=True) as recorder.http:
            yield recorder
    finally:
        await runner.cleanup()


def read_corpus(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the description and the requests of a corpus, with whole bodies."""
    about, *requests = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    before: dict[str, Any] = {}
    for request in requests:
        body = before | request["body"]
        for name in LISTS:
            if isinstance(packed := body.get(name), dict):
                body[name] = before.get(name, [])[: packed["kept"]] + packed["new"]
        request["body"] = before = body
    return about, requests


async def replay(
    http: aiohttp.ClientSession, url: str, key: str, requests: list[dict[str, Any]]
) -> None:
    """Send the requests of a corpus; ids of its answers become the ids of the new answers.

    Raises:
        RuntimeError: A request was refused.
    """
    names: dict[str, str] = {}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for request in requests:
        text = json.dumps(request["body"], ensure_ascii=False)
        for old, new in names.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        async with http.post(url + request["path"], data=text.encode(), headers=headers) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{request['path']}: {answer.status} {body.decode()[:300]}")
        names |= dict(zip(request["ids"], ids_of(body), strict=False))
