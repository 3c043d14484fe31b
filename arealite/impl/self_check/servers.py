"""Lets servers generate rows for the self-check."""

import asyncio
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


@dataclass(frozen=True)
class Generated:
    """The rows that one server generated, and its description of itself."""

    address: str
    info: dict[str, Any]
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
    wants_sums: bool = False

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

    def ask(self, names: NameRegistry) -> list[Generated]:
        """Let each server that holds the version generate from all prompts."""

        async def ask_all() -> list[Generated | None]:
            limit = aiohttp.ClientTimeout(self.timeout_s)
            async with aiohttp.ClientSession(timeout=limit) as session:
                servers = (entry.value for entry in names.list("llm_server"))
                return await asyncio.gather(*(self._ask(s, session, names) for s in servers))

        with Wait("answers to the self-check", owner="trainer-0", on="llm_server"):
            return [each for each in asyncio.run(ask_all()) if each]

    async def _ask(
        self, server: dict[str, Any], session: aiohttp.ClientSession, names: NameRegistry
    ) -> Generated | None:
        """Return what a server generated; None if it holds another version, or fails."""
        headers = names.headers(str(server.get("type") or ""))
        prompts, url = self.prompts(server.get("context_length")), str(server["address"])

        async def request(path: str, body: dict[str, object] | None = None) -> bytes:
            method = "GET" if body is None else "POST"
            async with session.request(method, url + path, json=body, headers=headers) as answer:
                if answer.status == 404:  # a server without this route
                    return b"{}"
                answer.raise_for_status()
                return await answer.read()

        async def generate(prompt: list[int]) -> wire.Answer:
            sampling = {"temperature": self.temperature, "max_new_tokens": NEW, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            return wire.decode_answer(await request("/generate", body))

        try:
            info = msgspec.json.decode(await request("/model_info"))
            if info.get("weight_version") != str(self.version):
                return None
            info |= msgspec.json.decode(await request("/server_info"))
            answers = await asyncio.gather(*map(generate, prompts))
            found = await request("/weight_sums", {}) if self.wants_sums else b"{}"
            sums = msgspec.json.decode(found, type=Sums)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            logger.warning("self-check: server not compared", address=url, error=repr(error))
            return None
        rows = [self.row(p, answer.output_ids) for p, answer in zip(prompts, answers, strict=True)]
        facts = {name: info.get(name) for name in ("dtype", "quantization")}
        return Generated(url, facts, rows, [wire.token_logprobs(each) for each in answers], sums)
