"""Agents that import nothing of AReaLite: functions and a program for tests of the harness.

As a program it asks once, prints the answer, and runs the Python code of its arguments.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from typing import Any


def body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": "policy", "messages": messages}


async def ask(endpoint: Any, text: str = "1+1=") -> str:
    """Send one user message; return the answer's text."""
    import aiohttp  # a sandbox has no packages

    key = {"Authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.base_url}/chat/completions"
    made = body([{"role": "user", "content": text}])
    async with (
        aiohttp.ClientSession(headers=key, raise_for_status=True) as http,
        http.post(url, json=made) as answer,
    ):
        return (await answer.json())["choices"][0]["message"]["content"]


def ask_blocking(base_url: str, key: str, text: str = "1+1=") -> str:
    """Send one user message without asyncio."""
    data, headers = json.dumps(body([{"role": "user", "content": text}])).encode(), {}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


async def trusting(task: Any, endpoint: Any) -> float:
    """Ask with a client that reads the environment's proxies."""
    import aiohttp

    key = {"Authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.base_url}/chat/completions"
    async with (
        aiohttp.ClientSession(headers=key, raise_for_status=True, trust_env=True) as http,
        http.post(url, json=body([{"role": "user", "content": "1+1="}])) as answer,
    ):
        await answer.read()
    return 0.5


async def with_sdk(task: Any, endpoint: Any) -> float:
    """Ask with the SDK of OpenAI."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "1+1="}]
        )
    return 0.5


def proxied(task: Any, endpoint: Any) -> None:
    """Ask with a client that ignores NO_PROXY."""
    proxy = urllib.request.ProxyHandler({"http": os.environ["HTTP_PROXY"]})
    opener = urllib.request.build_opener(proxy)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ""
    try:
        opener.open(f"{endpoint.base_url}/models", timeout=30)
    except urllib.error.HTTPError as error:
        error.close()
        raise ConnectionError("403") from None


async def number(task: Any, endpoint: Any) -> float:
    return float(await ask(endpoint, task.prompt) == task.ground_truth)


def blocking(task: Any, endpoint: Any) -> float:
    ask_blocking(endpoint.base_url, endpoint.api_key)
    return 0.5


async def blocking_the_loop(task: Any, endpoint: Any) -> float:
    return blocking(task, endpoint)


async def row(task: Any, endpoint: Any) -> Any:
    """Return the value of the row's column `result`."""
    await ask(endpoint)
    return task.columns["result"]


async def silent(task: Any, endpoint: Any) -> float:
    return 1.0


async def raising(task: Any, endpoint: Any) -> float:
    await ask(endpoint)
    return [][1]


async def refusing(task: Any, endpoint: Any) -> None:
    if task.columns["first"]:
        raise ValueError(task.task_id)
    raise ValueError(task.task_id)


async def generating(task: Any, endpoint: Any) -> Any:
    yield 1.0


async def leaving(task: Any, endpoint: Any) -> float:
    await ask(endpoint)
    sys.exit(3)


async def task_leaves(task: Any, endpoint: Any) -> None:
    await asyncio.create_task(leaving(task, endpoint))


async def two_errors(task: Any, endpoint: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(endpoint))
        group.create_task(raising(task, endpoint))


async def duel(task: Any, endpoint: Any) -> dict[str, Any]:
    """Ask with both seats, and reward each."""
    await asyncio.gather(*map(ask, endpoint.seats.values()))
    return {"x": 1.0, "o": {"reward": -1.0, "lost": 1}}


async def alone(task: Any, endpoint: Any) -> float:
    """Ask with one of the seats."""
    await ask(endpoint.seats["o"])
    return 2.0


async def posting(task: Any, endpoint: Any) -> None:
    import aiohttp

    await ask(endpoint)
    key = {"Authorization": f"Bearer {endpoint.api_key}"}
    url = f"{endpoint.base_url}/rl/sessions/current/reward"
    async with aiohttp.ClientSession(headers=key, raise_for_status=True) as http:
        await (await http.post(url, json={"reward": 0.25, "parts": {"style": 2.0}})).read()


began, cancelled = threading.Event(), threading.Event()


async def waiting(task: Any, endpoint: Any) -> float:
    began.set()
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()
    return 0.0


one_parameter = len

if __name__ == "__main__":
    said = ask_blocking(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print(f"thinking\n{said}", flush=True)
    exec(sys.argv[1])
