"""camel-ai's ChatAgent."""

from __future__ import annotations

from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter
from clients.tools import Job, add, weather


class Characters(BaseTokenCounter):
    """Counts tokens without a download of a vocabulary."""

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        """Return an estimate."""
        return len(str(messages)) // 4

    def encode(self, text: str) -> list[int]:
        """Return one number a character."""
        return [*map(ord, text)]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `encode`."""
        return "".join(map(chr, token_ids))


async def play(job: Job) -> str:
    """Ask the questions; the agent keeps its memory."""
    model: Any = ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        model_type=job.model,
        url=job.base_url,
        api_key=job.api_key,
        model_config_dict={"stream": True} if job.is_stream else {},
        token_counter=Characters(),
    )
    tools: Any = [FunctionTool(add), FunctionTool(weather)]
    agent: Any = ChatAgent("You are helpful.", model=model, tools=tools)
    text = ""
    for question in job.questions:
        answer = await agent.astep(question)
        if job.is_stream:
            async for part in answer:
                text = part.msgs[-1].content if part.msgs else text
        else:
            text = answer.msgs[-1].content
    return text
