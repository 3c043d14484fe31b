"""Lets servers generate rows for the self-check."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from arealite.api.engine import Sequence
from arealite.base import log
from arealite.base.model_folder import exact_length, text_part, vocab_size
from arealite.impl.client import wire
from arealite.impl.weights.sums import Sums
from arealite.system.health.waits import Wait
from arealite.system.names.registry import NameRegistry

logger = log.get(__name__)

LENGTHS = 1, 2, 3, 7, 12, 20, 33, 48
"""Lengths of the prompts. A further prompt is longer than the sliding window, if there is one."""
NEW = 24
"""Tokens that a server generates for each prompt."""
LONGEST = 8192
"""Longer sliding windows are not tested."""
REPORTED = "weight_version", "dtype", "quantization"
FAILURES = aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.DecodeError


@dataclass(frozen=True)
class Generated:
    """What one server generated, and its description of itself."""

    address: str
    info: dict[str, str | None]
    rows: list[Sequence]
    logprobs: list[list[float]]
    """Of the last tokens of each row."""
    sums: Sums
    """Checksums of its tensors; {} if it has no route for them, or if they were not wanted."""


@dataclass(frozen=True)
class Question:
    """The requests of a self-check."""

    model: dict[str, Any]
    """config.json of the model."""
    version: int
    """Servers that report another version are not asked: the publisher gives them no traffic."""
    temperature: float
    timeout_s: float
    alone: bool = False
    """Send one prompt at a time, and ask for checksums of the tensors."""

    def prompts(self, context: int | None = None) -> list[list[int]]:
        """Return random prompts that fit into `context` and the model's own context."""
        rng, text = np.random.default_rng(0), text_part(self.model)
        own = exact_length(self.model) or text.get("max_position_embeddings")
        most, window = min(context or LONGEST, own or LONGEST) - NEW, text.get("sliding_window")
        long = [window + LENGTHS[-1]] if window and window <= LONGEST else []
        size = vocab_size(self.model) or 1024
        low, high = size // 8, size * 3 // 4  # families keep special tokens at both ends
        fit = [length for length in (*LENGTHS, *long) if length <= most]
        return [rng.integers(low, high, length).tolist() for length in fit]

    def row(self, prompt: list[int], output: list[int]) -> Sequence:
        """Return a row whose last tokens are scored."""
        tokens = np.array([*prompt, *output], np.int32)
        first = max(1, len(tokens) - LENGTHS[-1] - NEW)
        return Sequence(tokens, np.arange(len(tokens)) >= first, self.temperature)

    def rows(self) -> list[Sequence]:
        """Return random rows, for a comparison without a server."""
        return [self.row(prompt, prompt[:1] * NEW) for prompt in self.prompts()]

    def ask(self, names: NameRegistry) -> list[Generated]:
        """Let each server that holds the version generate from all prompts."""

        async def ask_all() -> list[Generated | None]:
            limit = aiohttp.ClientTimeout(self.timeout_s)
            async with aiohttp.ClientSession(timeout=limit) as session:
                found = list(_channels(session, names))
                return await asyncio.gather(*map(self._ask, found))

        with Wait("answers to the self-check", owner="trainer-0", on="llm_server"):
            return [each for each in asyncio.run(ask_all()) if each]

    async def _ask(self, server: "Channel") -> Generated | None:
        """Return what a server generated; None if it holds another version, or fails."""
        prompts = self.prompts(server.context)
        try:
            info = msgspec.json.decode(await server.request("/model_info"))
            if info.get("weight_version") != str(self.version):
                return None
            info |= msgspec.json.decode(await server.request("/server_info"))
            if self.alone:
                answers = [await self._generate(server, prompt) for prompt in prompts]
                sums = msgspec.json.decode(await server.request("/weight_sums", {}), type=Sums)
            else:
                jobs = [self._generate(server, prompt) for prompt in prompts]
                answers, sums = await asyncio.gather(*jobs), Sums()
        except FAILURES as error:
            what = "self-check: server not compared"
            logger.warning(what, address=server.address, error=repr(error))
            return None
        outputs = zip(prompts, (answer.output_ids for answer in answers), strict=True)
        rows = [self.row(prompt, output) for prompt, output in outputs]
        logprobs = [wire.token_logprobs(answer) for answer in answers]
        facts = {name: info.get(name) for name in REPORTED}
        return Generated(server.address, facts, rows, logprobs, sums)

    async def _generate(self, server: "Channel", prompt: list[int]) -> wire.Answer:
        sampling = {"temperature": self.temperature, "max_new_tokens": NEW, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return wire.decode_answer(await server.request("/generate", body))


@dataclass(frozen=True)
class Channel:
    """The address of one server, and how requests reach it."""

    address: str
    context: int | None
    headers: dict[str, str]
    session: aiohttp.ClientSession

    async def request(self, path: str, body: dict[str, object] | None = None) -> bytes:
        """POST `body`, or GET without one; return the answer, or {} if there is no such route."""
        method, url = "GET" if body is None else "POST", self.address + path
        async with self.session.request(method, url, json=body, headers=self.headers) as answer:
            if answer.status == 404:
                return b"{}"
            answer.raise_for_status()
            return await answer.read()


def _channels(session: aiohttp.ClientSession, names: NameRegistry) -> Iterator[Channel]:
    for entry in names.list("llm_server"):
        context: Any = entry.value.get("context_length")
        headers = names.headers(str(entry.value.get("type") or ""))
        yield Channel(str(entry.value["address"]), context, headers, session)
