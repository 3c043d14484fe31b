"""Agents for fault tests of the gateway: a function and a program. They import nothing of AReaLite.

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
import time
import urllib.request
from contextlib import suppress
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


def main() -> None:
    """Play one turn more than an order needs, beside a child that would not end by itself."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    tell(at="began", pids=[os.getpid(), child.pid], folder=os.getcwd())
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    task = json.loads(Path("task.json").read_text())
    messages = [{"role": "user", "content": task["prompt"]}]
    for turn in range(STOPS + 1):
        if turn == STOPS:
            obey("program", task=task["task_id"])
        data = json.dumps({"model": "policy", "messages": messages}).encode()
        request = urllib.request.Request(url, data, key | {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, result(text)]
    Path("reward.json").write_text(json.dumps({"reward": 1.0, "attempt": os.getpid()}))


if __name__ == "__main__":
    main()
