"""Text from an OpenAI-style endpoint, for models that are not trained: opponents and judges.

Apart from the clients of trained models: here nobody sees tokens or versions. The key is in no log
and no error.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from arealite.api.agent_config import FixedPolicyConfig
from arealite.base.errors import DeadlineError, EpisodeError, UserError
from arealite.impl.client.wire import error_message
from arealite.system.health.waits import deadline

MAX_BYTES = 8 << 20
"""Of one answer."""
MAX_BACKOFF_S = 20.0
TRY_AGAIN = frozenset((408, 409, 425, 429))


class FixedPolicyFailed(EpisodeError):
    """The model of a seat that is not trained gave no answer."""

    failure_class = "fixed_policy"


class Message(msgspec.Struct):
    """What was said."""

    content: str


class Choice(msgspec.Struct):
    """One answer of an endpoint."""

    message: Message


class Completion(msgspec.Struct):
    """What an endpoint returns."""

    choices: list[Choice]


class TryAgain(Exception):
    """A try failed in a way that another may not."""

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(what)
        self.after_s = after_s


decode = msgspec.json.Decoder(Completion).decode


class Completions:
    """An endpoint's /chat/completions; one a worker, made by `connect`."""

    def __init__(self, config: FixedPolicyConfig, session: aiohttp.ClientSession, key: str) -> None:
        self.config = config
        self.url = config.base_url.rstrip("/") + "/chat/completions"
        self._session = session
        self._key = key
        self._slots = asyncio.Semaphore(config.connections)

    @classmethod
    @asynccontextmanager
    async def connect(cls, config: FixedPolicyConfig) -> AsyncIterator[Completions]:
        """Open connections; close them at the end.

        Raises:
            UserError: the address is none, or the key is not there.
        """
        place = urlsplit(config.base_url)
        if (
            place.scheme not in ("http", "https")
            or not place.hostname
            or place.query
            or "@" in place.netloc
        ):
            raise UserError(
                "fixed_policy.base_url must be http://HOST[:PORT]/… or https://…, without a key or "
                "password in it: those go into the variable that fixed_policy.api_key_env names."
            )
        key = os.environ.get(config.api_key_env or "", "").strip()
        if config.api_key_env and not key:
            raise UserError(
                f"the environment has no {config.api_key_env}, which fixed_policy.api_key_env "
                "names. Export it where train.py is started."
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=config.connections)
        async with aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # each try has a deadline
        ) as session:
            yield cls(config, session, key)

    async def ask(self, messages: Sequence[dict[str, Any]], *, owner: str) -> str:
        """Return what the model says next; errors of the endpoint are tried again, later each time.

        Raises:
            FixedPolicyFailed: it refused, or did not answer in any try.
        """
        sampling, config = self.config.sampling, self.config
        body: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        what = ""
        for attempt in range(1 + config.retries):
            try:
                async with self._slots:
                    return await self._try(body, owner)
            except TryAgain as error:
                what = str(error)
                backoff = min(MAX_BACKOFF_S, max(error.after_s, 0.5 * 2**attempt))
            if attempt < config.retries:
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
        raise FixedPolicyFailed(f"{self.url}: {what} (try {1 + config.retries})")

    async def _try(self, body: dict[str, Any], owner: str) -> str:
        host = urlsplit(self.url).netloc
        limits = {"owner": owner, "on": f"endpoint {host}", "seconds": self.config.timeout_s}
        try:
            async with (
                deadline("an answer of a fixed policy", **limits),
                self._session.post(self.url, json=body, allow_redirects=False) as response,
            ):
                raw = bytearray()
                async for part in response.content.iter_any():
                    raw += part
                    if len(raw) > MAX_BYTES:
                        raise TryAgain(f"its answer is longer than {MAX_BYTES} bytes")
        except DeadlineError as error:
            raise TryAgain(f"no answer in {self.config.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TryAgain(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return self._read(bytes(raw))
        if self._key:  # before the message is cut, perhaps within the key
            raw = raw.replace(self._key.encode(), b"***")
        message = error_message(response.status, bytes(raw))
        if response.status >= 500 or response.status in TRY_AGAIN:
            raise TryAgain(message, _seconds(response.headers.get("Retry-After", "")))
        raise FixedPolicyFailed(f"{self.url}: {message}")

    def _read(self, raw: bytes) -> str:
        try:
            return decode(raw).choices[0].message.content
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
            raise TryAgain(f"its answer is no chat completion: {error}") from error


def _seconds(text: str) -> float:
    """Return a Retry-After in seconds; 0 where it is a date, or none."""
    return float(text) if text.isascii() and text.isdigit() else 0.0
