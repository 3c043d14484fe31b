"""The openai SDK, /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from clients.tools import SCHEMAS, Job, call
from openai import AsyncOpenAI

TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
    for name, (text, schema) in SCHEMAS.items()
]


async def play(job: Job, client: Any = None) -> str:
    """Ask the questions; answer the tool calls of each answer."""
    client = client or AsyncOpenAI(base_url=job.base_url, api_key=job.api_key)
    messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    text = ""
    for question in job.questions:
        messages.append({"role": "user", "content": question})
        while True:
            options = {"model": job.model, "messages": messages, "tools": TOOLS}
            if job.is_stream:
                async with client.chat.completions.stream(**options) as stream:
                    answer = (await stream.get_final_completion()).choices[0].message
            else:
                answer = (await client.chat.completions.create(**options)).choices[0].message
            messages.append(answer)
            text = answer.content or text
            if not answer.tool_calls:
                break
            for each in answer.tool_calls:
                result = call(each.function.name, each.function.arguments)
                messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
    return text
