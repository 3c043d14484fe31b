"""The openai SDK, /v1/responses: the whole history, or `previous_response_id` when streamed."""

from __future__ import annotations

from typing import Any

from clients.tools import SCHEMAS, Job, call
from openai import AsyncOpenAI

TOOLS = [
    {"type": "function", "name": name, "description": text, "parameters": schema, "strict": False}
    for name, (text, schema) in SCHEMAS.items()
]


async def play(job: Job) -> str:
    """Ask the questions; answer the tool calls of each answer."""
    client: Any = AsyncOpenAI(base_url=job.base_url, api_key=job.api_key)
    history: list[Any] = []
    previous, text = None, ""
    for question in job.questions:
        new: list[Any] = [{"role": "user", "content": question}]
        while new:
            history += new
            options = {"model": job.model, "tools": TOOLS, "instructions": "Be helpful."}
            if job.is_stream:
                options |= {"input": new, "previous_response_id": previous}
                async with client.responses.stream(**options) as stream:
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(input=history, **options)
            previous = answer.id
            history += answer.output
            text = answer.output_text or text
            new = [
                {
                    "type": "function_call_output",
                    "call_id": each.call_id,
                    "output": call(each.name, each.arguments),
                }
                for each in answer.output
                if each.type == "function_call"
            ]
    return text
