"""SDKs on connections that are cut: openai if streamed, else anthropic.

The SDKs repeat whole requests themselves. Nothing repeats a stream that broke off, so this client
sends it again with the same Idempotency-Key.
"""

from __future__ import annotations

import uuid
from typing import Any

from anthropic import AsyncAnthropic
from clients import anthropic_messages, openai_chat
from clients.tools import Job
from openai import AsyncOpenAI, OpenAIError

ATTEMPTS = 60


class Patient:
    """Repeats broken streams of `client.chat.completions`."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.chat = self.completions = self

    async def create(self, **options: Any) -> Any:
        """Stream a completion until it is whole."""
        key = {"Idempotency-Key": uuid.uuid4().hex}
        for _ in range(ATTEMPTS):
            try:
                stream = self.client.chat.completions.stream(**options, extra_headers=key)
                async with stream as events:
                    return await events.get_final_completion()
            except OpenAIError as error:
                if getattr(error, "status_code", None):
                    raise
            except Exception as error:
                if "peer closed" not in str(error) and "Error" not in type(error).__name__:
                    raise
        raise RuntimeError("no attempt was answered")


async def play(job: Job) -> str:
    """Play the session of another driver with a client that retries often and at once."""
    if job.is_stream:
        client: Any = AsyncOpenAI(base_url=job.base_url, api_key=job.api_key, max_retries=ATTEMPTS)
        client._calculate_retry_timeout = lambda *_: 0.01
        job.is_stream = False
        return await openai_chat.play(job, Patient(client))
    client = AsyncAnthropic(
        base_url=job.anthropic_base_url, api_key=job.api_key, max_retries=ATTEMPTS
    )
    client._calculate_retry_timeout = lambda *_: 0.01
    return await anthropic_messages.play(job, client)
