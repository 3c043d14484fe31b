"""The anthropic SDK, /v1/messages."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from clients.tools import SCHEMAS, Job, call

TOOLS = [
    {"name": name, "description": text, "input_schema": schema}
    for name, (text, schema) in SCHEMAS.items()
]


async def play(job: Job, client: Any = None) -> str:
    """Ask the questions; answer the tool calls of each answer."""
    client = client or AsyncAnthropic(base_url=job.anthropic_base_url, api_key=job.api_key)
    messages: list[Any] = []
    text = ""
    for question in job.questions:
        content: Any = question
        while content:
            messages.append({"role": "user", "content": content})
            options = {"model": job.model, "messages": messages, "tools": TOOLS}
            options |= {"system": "You are a helpful assistant.", "max_tokens": 4000}
            options |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
            if job.is_stream:
                async with client.messages.stream(**options) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**options)
            messages.append({"role": "assistant", "content": answer.content})
            text = "".join(each.text for each in answer.content if each.type == "text") or text
            content = [
                {
                    "type": "tool_result",
                    "tool_use_id": each.id,
                    "content": call(each.name, each.input),
                }
                for each in answer.content
                if each.type == "tool_use"
            ]
    return text
