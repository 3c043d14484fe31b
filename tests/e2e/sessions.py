"""Agents for fault tests of the gateway: a function, a program, and agents that lease their tasks.

They import nothing of AReaLite.

An agent tells its answers in the file TOLD. The file ORDER holds a kind of session and the id of a
server: the next session of that kind stops the server before its third request. So a fault in the
middle of a turn needs no clock: no later generation ends.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

FILE = Path(__file__)
TURNS = 4
STOPS = 2
"""Number of finished turns when a session obeys an order."""
RETRY = {"x-stainless-retry-count": "1"}


def tell(**what: Any) -> None:
    """Append a line to TOLD; one write, so lines of several processes do not mix."""
    file = os.open(os.environ["TOLD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, json.dumps(what).encode() + b"\n")
    os.close(file)


def obey(kind: str, **what: Any) -> None:
    """Stop the server if the order is for this kind of session; one session takes an order."""
    with suppress(FileNotFoundError):
        order = Path(os.environ["ORDER"])
        wanted, server = order.read_text().split()
        if wanted == kind:
            order.unlink()
            os.kill(int(server), signal.SIGSTOP)
            tell(at="stopped", **what)


def result(text: str, stamp: str = "") -> dict[str, str]:
    """Return the result of the tool that the answer calls: it counts digits."""
    count = sum(map(str.isdigit, text))
    return {"role": "tool", "tool_call_id": "count", "content": f"{count} digits{stamp}. go on"}


async def ask(http: Any, url: str, messages: list[dict[str, str]], *, is_cut: bool) -> str:
    """Return the answer to a conversation; with `is_cut` the second time, after a cut stream."""
    body = {"model": "policy", "messages": messages, "stream": is_cut}
    if is_cut:
        async with http.post(url, json=body) as answer:
            await answer.content.readline()  # leaves the rest: this closes the connection
    async with http.post(url, json=body, headers=RETRY if is_cut else {}) as answer:
        data = await answer.text()
    if not is_cut:
        return json.loads(data)["choices"][0]["message"]["content"]
    events = [line[6:] for line in data.splitlines() if line.startswith("data: {")]
    choices = [json.loads(event)["choices"] for event in events]
    return "".join(each[0]["delta"].get("content") or "" for each in choices if each)


async def solve(task: Any, endpoint: Any) -> dict[str, float]:
    """Play four turns with a tool; where `a` is odd, the second message holds the time."""
    import aiohttp

    url, attempt = f"{endpoint.base_url}/chat/completions", secrets.randbits(48)
    key = {"Authorization": f"Bearer {endpoint.api_key}"}
    kind = "stamped" if task.extra_info["a"] % 2 else "plain"
    messages, text = [{"role": "user", "content": task.prompt}], ""
    async with aiohttp.ClientSession(headers=key, raise_for_status=True) as http:
        for turn in range(TURNS):
            if turn == STOPS:
                obey(kind, task=task.task_id)
            text = await ask(http, url, messages, is_cut=turn == 1)
            tell(at="answered", kind=kind, attempt=attempt, text=text)
            stamp = f" at {time.time_ns()}" if kind == "stamped" and not turn else ""
            messages += [{"role": "assistant", "content": text}, result(text, stamp)]
    return {"reward": sum(map(str.isdigit, text)) / 6, "attempt": attempt}


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    """Return the answer to a request."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def play(kind: str, url: str, key: str, task: dict[str, Any]) -> None:
    """Play one turn more than an order needs."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for turn in range(STOPS + 1):
        if turn == STOPS:
            obey(kind, task=task["task_id"])
        answer = post(f"{url}/chat/completions", key, {"model": "policy", "messages": messages})
        text = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, result(text)]


def program() -> None:
    """Play the task of a program, beside a child that would not end by itself."""
    if "TOLD" in os.environ:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        tell(at="began", pids=[os.getpid(), child.pid], folder=os.getcwd())
    task = json.loads(Path("task.json").read_text())
    play("program", os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task)
    Path("reward.json").write_text(json.dumps({"reward": 1.0, "attempt": os.getpid()}))


def pull(url: str, token: str) -> None:
    """Lease and play tasks for ever; give up a session whose worker died."""
    while True:
        try:
            leased = post(f"{url}/v1/rl/sessions", token, {"wait_s": 10})
            base, key = leased["base_url"], leased["api_key"]
            tell(at="leased", session=leased["session_id"], task=leased["task"]["task_id"])
            play("pulled", base, key, leased["task"])
            parts = {"attempt": secrets.randbits(48)}
            post(f"{base}/rl/sessions/current/reward", key, {"reward": 1.0, "parts": parts})
            post(f"{base}/rl/sessions/current/end", key, {})
        except (OSError, HTTPException):  # no task, or no worker
            time.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[1:]:
        for _ in range(int(sys.argv[2])):
            threading.Thread(target=pull, args=(sys.argv[1], os.environ["HARNESS_TOKEN"])).start()
    else:
        program()
