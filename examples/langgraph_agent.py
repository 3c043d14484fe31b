"""A LangGraph agent with a tool, trained unchanged: it imports nothing of AReaLite.

    pip install langgraph langchain-openai
    python3 examples/langgraph_agent.py model.path=/models/Qwen2.5-1.5B-Instruct

On a laptop:

    python3 examples/langgraph_agent.py

Watch reward/parts/correct and episode/turns_mean.
"""

import re
from functools import cache


def calculator(expression: str) -> str:
    """Compute an expression of numbers with + - *."""
    is_valid = len(expression) < 100 and re.fullmatch(r"(?!0\d)\d+([-+*](?!0\d)\d+)*", expression)
    return str(eval(expression)) if is_valid else "error: invalid expression"


@cache
def make_graph(base_url: str):
    """Return a graph that all episodes share; its `configurable` has the API key of one."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = ChatOpenAI(model="policy", base_url=base_url, api_key="none").bind_tools([calculator])

    async def think(state: MessagesState, config):
        key = {"Authorization": f"Bearer {config['configurable']['api_key']}"}
        return {"messages": [await model.ainvoke(state["messages"], extra_headers=key)]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


async def solve(task, endpoint):
    graph, messages = make_graph(endpoint.base_url), []
    config = {"configurable": {"api_key": endpoint.api_key}}
    values = graph.astream(
        {"messages": [("user", task.prompt)]}, config, stream_mode="values", recursion_limit=50
    )
    async for state in values:
        messages = state["messages"]
        if sum(message.type == "ai" for message in messages) == 3:
            break
    last, calls = messages[-1], sum(message.type == "tool" for message in messages)
    is_answer = last.type == "ai" and not last.tool_calls
    correct = is_answer and last.content.strip() == task.ground_truth
    needed = len(task.extra_info["tools"])
    efficiency = correct * (needed + 1) / (max(calls, needed) + 1)
    return {"reward": correct + 0.5 * efficiency, "correct": correct, "tool_calls": calls}


ENV = "trainer.ppo.collector.env"
OPTIONS = [f"{ENV}.type=harness", f"{ENV}.harness.run={__file__}:solve", "dataset.train=generated"]
OPTIONS += ["dataset.eval=generated", "trainer.ppo.publisher.type=shared", "trainer.ppo.lr=1e-6"]

if __name__ == "__main__":
    from _run import lesson, train

    train(OPTIONS, lambda: [*lesson("foreign_agent"), f"{ENV}.harness.run={__file__}:solve"])
