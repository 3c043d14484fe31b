"""An agent of Anthropic's Messages API in plain HTTP, which imports nothing of AReaLite.

    python3 examples/messages_agent.py model.path=/models/Qwen2.5-1.5B-Instruct

The API has content blocks: text, tool_use and tool_result. Programs such as Claude Code use it. On
a laptop:

    python3 examples/messages_agent.py

Watch reward/parts/correct and episode/turns_mean.
"""

import re

import aiohttp

TEXT = {"type": "string", "description": "numbers with + - *"}
SCHEMA = {"type": "object", "properties": {"expression": TEXT}, "required": ["expression"]}
TOOL = {"name": "calculator", "description": "Compute.", "input_schema": SCHEMA}


def calculate(expression: str) -> str:
    is_valid = len(expression) < 100 and re.fullmatch(r"(?!0\d)\d+([-+*](?!0\d)\d+)*", expression)
    return str(eval(expression)) if is_valid else "error: invalid expression"


async def ask(http: aiohttp.ClientSession, endpoint, messages):
    body = {"model": endpoint.model, "max_tokens": 1024, "messages": messages, "tools": [TOOL]}
    headers = {"x-api-key": endpoint.api_key, "anthropic-version": "2023-06-01"}
    url = f"{endpoint.anthropic_base_url}/v1/messages"
    async with http.post(url, json=body, headers=headers, raise_for_status=True) as answer:
        return (await answer.json())["content"]


async def solve(task, endpoint):
    messages, calls, used = [{"role": "user", "content": task.prompt}], 0, True
    async with aiohttp.ClientSession() as http:
        for _ in range(3):
            content = await ask(http, endpoint, messages)
            used = [block for block in content if block["type"] == "tool_use"]
            calls += len(used)
            if not used:
                break
            results = [
                (block["id"], calculate(str(block["input"]["expression"]))) for block in used
            ]
            blocks = [
                {"type": "tool_result", "tool_use_id": name, "content": text}
                for name, text in results
            ]
            messages.append({"role": "assistant", "content": content})
            messages.append({"role": "user", "content": blocks})
    text = "".join(block["text"] for block in content if block["type"] == "text")
    correct = not used and text.strip() == task.ground_truth
    needed = len(task.extra_info["tools"])
    efficiency = correct * (needed + 1) / (max(calls, needed) + 1)
    return {"reward": correct + 0.5 * efficiency, "correct": correct, "tool_calls": calls}


ENV = "trainer.ppo.collector.env"
OPTIONS = [f"{ENV}.type=harness", f"{ENV}.harness.run={__file__}:solve", "dataset.train=generated"]
OPTIONS += ["dataset.eval=generated", "trainer.ppo.publisher.type=shared", "trainer.ppo.lr=1e-6"]

if __name__ == "__main__":
    from _run import lesson, train

    train(OPTIONS, lambda: [*lesson("foreign_agent"), f"{ENV}.harness.run={__file__}:solve"])
