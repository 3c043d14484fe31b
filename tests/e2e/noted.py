"""The plugin `noted`: the training client notes its requests and answers in the file NOTES.

It changes the client of the process that imports it, so only the processes of a run do.

Digests are those of `TurnNode`, so a note names the turn in which its tokens are trained.
"""

from __future__ import annotations

import json
import os
from array import array
from typing import Any

from arealite.api.llm import LLMRequest, LLMResponse
from arealite.api.turns import arrays, blake2b
from arealite.impl.client.servers_client import ServersClient

generate, post = ServersClient.generate, ServersClient._post


def note(at: str, request: LLMRequest, answer: str = "") -> None:
    """Append a line to NOTES."""
    _, member, _, index = request.request_id.rsplit("/", 3)
    prompt = blake2b(array("i", request.input_ids)).hexdigest()
    line = [at, os.getpid(), request.group_id, int(member), int(index), prompt, answer]
    file = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, json.dumps(line).encode() + b"\n")
    os.close(file)


async def noting_generate(self: Any, request: LLMRequest) -> LLMResponse:
    response = await generate(self, request)
    note("done", request, blake2b(b"".join(arrays(response))).hexdigest())
    return response


async def noting_post(self: Any, generation: Any, *others: Any) -> Any:
    note("posted", generation.request)
    return await post(self, generation, *others)


ServersClient.generate = noting_generate  # type: ignore[method-assign]
ServersClient._post = noting_post  # type: ignore[method-assign]
