"""An agent of OpenAI's SDK with a tool, trained unchanged: it imports nothing of AReaLite.

    python3 examples/openai_agent.py model.path=/models/Qwen2.5-1.5B-Instruct

`solve` plays an episode. Its reward: 1 if right, and up to 0.5 more for few calls. On a laptop:

    python3 examples/openai_agent.py

Watch reward/parts/correct, episode/turns_mean. Tutorial: docs/tutorials/unmodified_agent.md
"""

import json
import re
from functools import cache

from openai import AsyncOpenAI, DefaultAioHttpClient

TEXT = {"type": "string", "description": "numbers with + - *"}
PARAMETERS = {"type": "object", "properties": {"expression": TEXT}, "required": ["expression"]}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}


@cache
def connect(url: str) -> AsyncOpenAI:  # one for all episodes; aiohttp is faster
    return AsyncOpenAI(base_url=url, api_key="unused", http_client=DefaultAioHttpClient())


def calculate(arguments: str) -> str:
    expression = str(json.loads(arguments).get("expression"))
    is_valid = len(expression) < 100 and re.fullmatch(r"(?!0\d)\d+([-+*](?!0\d)\d+)*", expression)
    return str(eval(expression)) if is_valid else "error: invalid expression"


async def solve(task, endpoint):
    client = connect(endpoint.base_url).with_options(api_key=endpoint.api_key)
    messages, calls = [{"role": "user", "content": task.prompt}], 0
    for _ in range(3):
        options = {"model": endpoint.model, "tools": [TOOL]}
        answer = await client.chat.completions.create(messages=messages, **options)
        messages.append(message := answer.choices[0].message)
        for call in message.tool_calls or []:
            content = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        calls += len(message.tool_calls or [])
        if not message.tool_calls:
            break
    correct = not message.tool_calls and (message.content or "").strip() == task.ground_truth
    needed = len(task.extra_info["tools"])
    efficiency = correct * (needed + 1) / (max(calls, needed) + 1)
    return {"reward": correct + 0.5 * efficiency, "correct": correct, "tool_calls": calls}


ENV = "trainer.ppo.collector.env"
OPTIONS = [f"{ENV}.type=harness", f"{ENV}.harness.run={__file__}:solve", "dataset.train=generated"]
OPTIONS += ["dataset.eval=generated", "trainer.ppo.publisher.type=shared", "trainer.ppo.lr=1e-6"]

if __name__ == "__main__":
    from _run import lesson, train

    train(OPTIONS, lambda: [*lesson("foreign_agent"), f"{ENV}.harness.run={__file__}:solve"])
