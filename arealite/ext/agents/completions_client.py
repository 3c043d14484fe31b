"""Client of an OpenAI-style endpoint, for models that are not trained: opponents and judges.

It handles text, without tokens and versions. No log line and no error contains the API key.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import msgspec

from arealite.base.errors import DeadlineError, EpisodeError, UserError
from arealite.ext.agents.config import FixedPolicyConfig
from arealite.impl.http_client import error_message
from arealite.system.health.waits import Wait

MAX_BYTES = 8 << 20
"""Maximum size of one answer."""
MAX_BACKOFF_S = 20.0
RETRIED_STATUSES = frozenset((408, 409, 425, 429))


class FixedPolicyFailed(EpisodeError, failure_class="fixed_policy"):
    """The model of a fixed policy gave no answer."""


class AnswerMessage(msgspec.Struct, kw_only=True):
    """A chat message."""

    content: str


class Choice(msgspec.Struct, kw_only=True):
    """One of the completions in an answer."""

    message: AnswerMessage


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """The JSON body of an answer."""

    choices: list[Choice]


class TryAgain(Exception):
    """An attempt failed; another attempt may succeed.

    Args:
        message: Why the attempt failed.
        after_s: Minimum seconds to wait before the next attempt.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


decode = msgspec.json.Decoder(CompletionAnswer).decode


class CompletionsClient:
    """Client of an endpoint's /chat/completions. A worker opens one with `connect`."""

    def __init__(self, config: FixedPolicyConfig, session: aiohttp.ClientSession, key: str) -> None:
        self.config = config
        self.url = config.base_url.rstrip("/") + "/chat/completions"
        self._session = session
        self._key = key
        self._slots = asyncio.Semaphore(config.connections)

    @classmethod
    @asynccontextmanager
    async def connect(cls, config: FixedPolicyConfig) -> "AsyncIterator[CompletionsClient]":
        """Open a session; close its connections when the body exits.

        Raises:
            UserError: The address is invalid, or the key's environment variable is not set.
        """
        url = urlsplit(config.base_url)
        is_plain = url.hostname and not url.query and "@" not in url.netloc
        if url.scheme not in ("http", "https") or not is_plain:
            raise UserError(
                "fixed_policy.base_url must be http://HOST[:PORT]/… or https://…, "
                "without a key or password in it. "
                "Put the key into the environment variable that fixed_policy.api_key_env names."
            )
        key = os.environ.get(config.api_key_env or "", "").strip()
        if config.api_key_env and not key:
            raise UserError(
                f"fixed_policy.api_key_env={config.api_key_env}: "
                "this environment variable is not set. Export it where train.py is started."
            )
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=config.connections),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # each attempt has a deadline of its own
        ) as session:
            yield cls(config, session, key)

    async def ask(self, messages: Sequence[dict[str, object]], *, owner: str) -> str:
        """Return the model's answer to a conversation.

        Errors of the endpoint are retried with exponential backoff, `retries` times.

        Args:
            messages: The conversation, as OpenAI chat messages.
            owner: Shown by `arealite why` as the part that waits.

        Raises:
            FixedPolicyFailed: The endpoint refused the request, or all attempts failed.
        """
        config = self.config
        sampling = config.sampling
        body: dict[str, object] = {
            "model": config.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        reason = ""
        for attempt in range(1 + config.retries):
            try:
                async with self._slots:
                    return await self._try(body, owner)
            except TryAgain as error:
                reason = str(error)
                backoff = min(MAX_BACKOFF_S, max(error.after_s, 0.5 * 2**attempt))
            if attempt < config.retries:
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
        raise FixedPolicyFailed(f"{self.url}: {reason} (after {1 + config.retries} attempts)")

    async def _try(self, body: dict[str, object], owner: str) -> str:
        wait = Wait(
            event="an answer of a fixed policy",
            owner=owner,
            on=f"endpoint {urlsplit(self.url).netloc}",
            seconds=self.config.timeout_s,
        )
        try:
            with wait:
                post = self._session.post(self.url, json=body, allow_redirects=False)
                async with post as response:
                    raw = bytearray()
                    async for part in response.content.iter_any():
                        raw += part
                        if len(raw) > MAX_BYTES:
                            raise TryAgain(f"the answer is longer than {MAX_BYTES} bytes")
        except DeadlineError as error:
            raise TryAgain(f"no answer in timeout_s={self.config.timeout_s:g}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TryAgain(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return self._read(bytes(raw))
        if self._key:  # before `error_message` truncates the text, perhaps inside the key
            raw = raw.replace(self._key.encode(), b"***")
        message = error_message(response.status, bytes(raw))
        if response.status >= 500 or response.status in RETRIED_STATUSES:
            retry_after = response.headers.get("Retry-After", "")  # seconds, or a date
            after_s = float(retry_after) if retry_after.isdecimal() else 0.0
            raise TryAgain(message, after_s)
        raise FixedPolicyFailed(f"{self.url}: {message}")

    def _read(self, raw: bytes) -> str:
        try:
            return decode(raw).choices[0].message.content
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
            raise TryAgain(f"the answer is not a chat completion: {error}") from error
