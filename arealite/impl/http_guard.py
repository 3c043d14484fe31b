"""Decides which HTTP requests a server answers: none of web pages, none without the token.

Used by embedded servers and by environment servers.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from arealite.base import log

logger = log.get(__name__)

OPEN = frozenset(("/health",))
"""Paths that need no token."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guard(token: str, *hosts: str) -> Any:
    """Return aiohttp middleware that refuses foreign requests.

    A page that a browser shows can send requests to loopback, too. Its requests have an `Origin`
    header; and if its host name was rebound to an address of this machine, they have that name as
    `Host`.

    Args:
        token: What requests have to send as `Authorization: Bearer TOKEN`; "" lets all in.
        hosts: Host names of this server besides localhost and the machine's own; addresses are
            always its own.
    """
    names, told = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}, set[str]()

    def refuse(request: web.Request, status: int, why: str) -> web.Response:
        peer = str(request.remote)
        if peer not in told and len(told) < 100:
            told.add(peer)
            logger.warning("request refused", peer=peer, path=request.path, why=why)
        return web.json_response({"error": {"message": why, "code": status}}, status=status)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if "Origin" in request.headers:
            return refuse(request, 403, "requests of web pages are refused")
        if not _is_own(request.headers.get("Host", ""), names):
            return refuse(request, 403, "the Host header is not a name of this server")
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        is_known = hmac.compare_digest(sent.encode(errors="surrogateescape"), token.encode())
        if token and not is_known and request.path not in OPEN:
            return refuse(request, 401, "the bearer token is missing, or is not this server's")
        return await handler(request)

    return check


def _is_own(host: str, names: set[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in names:
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
