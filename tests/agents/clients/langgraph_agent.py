"""LangGraph's ReAct agent with langchain-openai."""

from __future__ import annotations

from typing import Any

from clients.tools import Job, add, weather
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


async def play(job: Job) -> str:
    """Run the graph for each question; the history is its own."""
    model: Any = ChatOpenAI(
        model=job.model, base_url=job.base_url, api_key=job.api_key, streaming=job.is_stream
    )
    graph: Any = create_react_agent(model, [tool(add), tool(weather)], prompt="You are helpful.")
    messages: list[Any] = []
    for question in job.questions:
        messages.append({"role": "user", "content": question})
        result = await graph.ainvoke({"messages": messages}, {"recursion_limit": 100})
        messages = result["messages"]
    return str(messages[-1].content)
