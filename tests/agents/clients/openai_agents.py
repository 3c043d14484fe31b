"""The openai-agents SDK: /v1/responses if streamed, else /v1/chat/completions."""

from __future__ import annotations

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from clients.tools import Job, add, weather
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def play(job: Job) -> str:
    """Run the SDK's loop for each question; the history is its own."""
    client = AsyncOpenAI(base_url=job.base_url, api_key=job.api_key)
    kind = OpenAIResponsesModel if job.is_stream else OpenAIChatCompletionsModel
    model = kind(model=job.model, openai_client=client)
    tools = [function_tool(add), function_tool(weather)]
    agent = Agent(name="Helper", instructions="You are helpful.", model=model, tools=[*tools])
    history, text = [], ""
    for question in job.questions:
        history.append({"role": "user", "content": question})
        if job.is_stream:
            result = Runner.run_streamed(agent, history, max_turns=30)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, history, max_turns=30)
        history = result.to_input_list()
        text = str(result.final_output)
    return text
