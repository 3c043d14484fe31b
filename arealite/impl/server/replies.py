"""Answers of the embedded server as JSON; apart because two modules have routes."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

encode = msgspec.json.Encoder().encode


def as_json(value: Any, status: int = 200) -> web.Response:
    """Answer with a value."""
    return web.Response(body=encode(value), status=status, content_type="application/json")


def as_error(status: int, text: str) -> web.Response:
    """Answer with an error, in SGLang's form."""
    return as_json({"error": {"message": text}}, status)
