"""Small clients of the gateway's APIs with the habits of real ones.

`play` asks questions and answers tool calls. A client keeps its history in the form of its API.
Habits: "thoughts" (thoughts are sent back), "reserialised" (arguments are written anew),
"trimmed" (texts are stripped), "renamed" (calls get other ids), "extra" (fields come and go).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from arealite.ext.gateway.session import GatewaySession

SCHEMA = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@dataclass
class Said:
    """An answer, independent of the API."""

    text: str = ""
    thought: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Id, name, arguments."""


class Refused(Exception):
    """An answer with an error status."""


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events."""
    for block in body.decode().split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


class SimpleClient:
    """Base of the clients."""

    path = ""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        session: GatewaySession,
        *,
        stream: bool,
        habits: Iterable[str],
    ) -> None:
        self.http, self.is_stream, self.habits = http, stream, frozenset(habits)
        self.endpoint = session.endpoint
        self.history: list[dict[str, Any]] = []
        self.renamed = 0
        self.headers = {"Authorization": f"Bearer {self.endpoint.api_key}"}

    async def play(self, questions: Iterable[str], tool: Callable[[str, str], str]) -> str:
        """Ask each question; call the tools until an answer has no call."""
        said = Said()
        for question in questions:
            self.user(question)
            while (said := await self.ask()).calls:
                self.results([(id, tool(name, given)) for id, name, given in self.remember(said)])
            self.remember(said)
        return said.text

    async def ask(self, **changes: Any) -> Said:
        """Send the history; return the answer."""
        body = json.dumps(self.body() | changes, ensure_ascii=False)
        url = self.endpoint.anthropic_base_url + self.path
        async with self.http.post(url, data=body.encode(), headers=self.headers) as response:
            data = await response.read()
            if response.status != 200:
                raise Refused(f"{response.status}: {data.decode()[:500]}")
        return self.streamed(data) if self.is_stream else self.whole(json.loads(data))

    def remember(self, said: Said) -> list[tuple[str, str, str]]:
        """Add an answer to the history as the habits want it; return its calls as sent."""
        text = said.text.strip() if "trimmed" in self.habits else said.text
        calls = said.calls
        if "reserialised" in self.habits:
            calls = [(i, n, json.dumps(json.loads(g), sort_keys=True)) for i, n, g in calls]
        if "renamed" in self.habits:
            self.renamed += len(calls)
            calls = [(f"x{self.renamed:07}{i}", n, g) for i, (_, n, g) in enumerate(calls)]
        self.assistant(Said(text, said.thought if "thoughts" in self.habits else "", calls))
        return calls

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def user(self, text: str) -> None:
        raise NotImplementedError

    def results(self, results: list[tuple[str, str]]) -> None:
        raise NotImplementedError

    def assistant(self, said: Said) -> None:
        raise NotImplementedError

    def whole(self, body: dict[str, Any]) -> Said:
        raise NotImplementedError

    def streamed(self, body: bytes) -> Said:
        raise NotImplementedError


class ChatClient(SimpleClient):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in SCHEMA.items()
        ]
        system = {"role": "system", "content": "Be helpful."}
        body = {"model": "policy", "messages": [system, *self.history], "tools": tools}
        return body | {"stream": self.is_stream}

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, results: list[tuple[str, str]]) -> None:
        for id, text in results:
            self.history.append({"role": "tool", "tool_call_id": id, "content": text})

    def assistant(self, said: Said) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.thought:
            message["reasoning_content"] = said.thought
        if said.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": given}}
                for id, name, given in said.calls
            ]
        if "extra" in self.habits:
            message |= {"name": f"agent{len(self.history)}", "refusal": None}
        self.history.append(message)

    def whole(self, body: dict[str, Any]) -> Said:
        message = body["choices"][0]["message"]
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or []
        ]
        return Said(message["content"] or "", message.get("reasoning_content") or "", calls)

    def streamed(self, body: bytes) -> Said:
        said, calls = Said(), dict[int, list[str]]()
        for event in events(body):
            for choice in event["choices"]:
                delta = choice["delta"]
                said.text += delta.get("content") or ""
                said.thought += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls") or []:
                    made = calls.setdefault(call["index"], ["", "", ""])
                    made[0] += call.get("id") or ""
                    made[1] += call["function"].get("name") or ""
                    made[2] += call["function"].get("arguments") or ""
        said.calls = [(i, n, g) for i, n, g in calls.values()]
        return said


class ResponsesClient(SimpleClient):
    """/v1/responses; with the habit "previous", only new items are sent."""

    path = "/v1/responses"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent = 0
        self.previous: str | None = None

    def body(self) -> dict[str, Any]:
        tools = [
            {"type": "function", "name": name, "parameters": schema, "strict": False}
            for name, schema in SCHEMA.items()
        ]
        body = {"model": "policy", "input": self.history, "tools": tools}
        if self.previous:
            body |= {"input": self.history[self.sent :], "previous_response_id": self.previous}
        return body | {"stream": self.is_stream, "instructions": "Be helpful."}

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, results: list[tuple[str, str]]) -> None:
        for id, text in results:
            item = {"type": "function_call_output", "call_id": id, "output": text}
            self.history.append(item)

    def assistant(self, said: Said) -> None:
        if said.thought:
            content = [{"type": "reasoning_text", "text": said.thought}]
            made = {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}
            self.history.append(made)
        if said.text:
            content = [{"type": "output_text", "text": said.text, "annotations": []}]
            self.history.append({"type": "message", "role": "assistant", "content": content})
        for id, name, given in said.calls:
            call = {"type": "function_call", "call_id": id, "name": name, "arguments": given}
            self.history.append(call)
        self.sent = len(self.history)

    def whole(self, body: dict[str, Any]) -> Said:
        said = Said()
        if "previous" in self.habits:
            self.previous = body["id"]
        for item in body["output"]:
            if item["type"] == "message":
                said.text += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                said.thought += "".join(part["text"] for part in item["content"])
            else:
                said.calls.append((item["call_id"], item["name"], item["arguments"]))
        return said

    def streamed(self, body: bytes) -> Said:
        text, arguments, end = "", "", dict[str, Any]()
        for event in events(body):
            text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            if event["type"] == "response.function_call_arguments.delta":
                arguments += event["delta"]
            end = event
        said = self.whole(end["response"])
        assert (text, arguments) == (said.text, "".join(given for _, _, given in said.calls))
        return said


class MessagesClient(SimpleClient):
    """/v1/messages."""

    path = "/v1/messages"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.headers = {"x-api-key": self.endpoint.api_key, "anthropic-version": "2023-06-01"}

    def body(self) -> dict[str, Any]:
        tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMA.items()]
        history = [*self.history]
        if "extra" in self.habits:  # like Claude Code: on the last block alone
            last = history[-1]["content"]
            last = [{"type": "text", "text": last}] if isinstance(last, str) else last
            marked = [*last[:-1], last[-1] | {"cache_control": {"type": "ephemeral"}}]
            history[-1] = history[-1] | {"content": marked}
        body = {"model": "policy", "max_tokens": 4000, "messages": history, "tools": tools}
        return body | {
            "stream": self.is_stream,
            "system": [{"type": "text", "text": "Be helpful."}],
        }

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, results: list[tuple[str, str]]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results
        ]
        self.history.append({"role": "user", "content": blocks})

    def assistant(self, said: Said) -> None:
        blocks: list[dict[str, Any]] = []
        if said.thought:
            blocks.append({"type": "thinking", "thinking": said.thought, "signature": ""})
        if said.text:
            blocks.append({"type": "text", "text": said.text})
        for id, name, given in said.calls:
            call = {"type": "tool_use", "id": id, "name": name, "input": json.loads(given)}
            blocks.append(call)
        self.history.append({"role": "assistant", "content": blocks})

    def whole(self, body: dict[str, Any]) -> Said:
        said = Said()
        for block in body["content"]:
            if block["type"] == "text":
                said.text += block["text"]
            elif block["type"] == "thinking":
                said.thought += block["thinking"]
            else:
                said.calls.append((block["id"], block["name"], json.dumps(block["input"])))
        return said

    def streamed(self, body: bytes) -> Said:
        said, kinds, given = Said(), dict[int, dict[str, Any]](), dict[int, str]()
        for event in events(body):
            if event["type"] == "content_block_start":
                kinds[event["index"]] = event["content_block"]
                given[event["index"]] = ""
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                said.text += delta.get("text", "")
                said.thought += delta.get("thinking", "")
                given[event["index"]] += delta.get("partial_json", "")
        for index, block in kinds.items():
            if block["type"] == "tool_use":
                said.calls.append((block["id"], block["name"], given[index] or "{}"))
        return said


CLIENTS: dict[str, type[SimpleClient]] = {
    "chat": ChatClient,
    "responses": ResponsesClient,
    "messages": MessagesClient,
}
