"""smolagents' ToolCallingAgent; its answer is the tool `final_answer`."""

from __future__ import annotations

import asyncio
from typing import Any

from clients.tools import Job, add, weather
from smolagents import OpenAIModel, ToolCallingAgent, tool


async def play(job: Job) -> str:
    """Run the agent for each question; it keeps its memory."""
    return await asyncio.to_thread(_run, job)


def _run(job: Job) -> str:
    model: Any = OpenAIModel(job.model, api_base=job.base_url, api_key=job.api_key)
    agent: Any = ToolCallingAgent(
        tools=[tool(add), tool(weather)],
        model=model,
        max_steps=12,
        stream_outputs=job.is_stream,
        verbosity_level=0,
    )
    answers = [str(agent.run(question, reset=False)) for question in job.questions]
    return answers[-1]
