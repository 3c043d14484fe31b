"""Keeps a vLLM server paused while its weights are incomplete.

vLLM would sample from a half-loaded model, or crash at the next token. The gate asks the workers
before it lets a request through that would continue sampling.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
ReceiveMessage = Callable[[], Awaitable[Message]]
SendMessage = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, ReceiveMessage, SendMessage], Awaitable[None]]
"""An ASGI application."""

RESUMING = frozenset(("/resume", "/wake_up"))
"""Paths that continue sampling."""
STARTING = frozenset(("/start_weight_update", "/start_draft_weight_update"))


class UpdateGate:
    """ASGI middleware that answers 409 to a request that would sample from incomplete weights."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: ReceiveMessage, send: SendMessage) -> None:
        reason = ""
        if scope["type"] == "http" and scope["method"] == "POST":
            reason = await refusal_of_post(scope["path"], scope)
        if reason:
            await send_error(send, 409, reason)
        else:
            await self._app(scope, receive, send)


async def refusal_of_post(path: str, scope: Message) -> str:
    """Return why the server must not take a request now; "" if it may."""
    if path not in STARTING | RESUMING:
        return ""
    engine: Any = scope["app"].state.engine_client
    if path in STARTING:
        is_paused = await engine.is_paused()
        return "" if is_paused else "pause the server before a weight update"
    states = await engine.collective_rpc("arealite_state")
    obstacles = [state["obstacle"] for state in states if state["obstacle"]]
    return obstacles[0] if obstacles else ""


async def send_error(send: SendMessage, status: int, reason: str) -> None:
    """Answer a request with an error in JSON, as AReaLite's own servers do."""
    body = json.dumps({"error": {"message": reason, "code": status}}).encode()
    headers = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
