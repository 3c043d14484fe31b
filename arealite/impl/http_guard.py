"""Refuses HTTP requests of web pages and requests without the token.

Embedded servers and environment servers use it.
"""

import hmac
import ipaddress
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from arealite.base import log

logger = log.get(__name__)

OPEN = frozenset(("/health",))
"""Paths that need no token."""


def guard(token: str, *hosts: str, is_page: bool = False) -> Middleware:
    """Return aiohttp middleware that refuses foreign requests.

    A web page in a browser can send requests to loopback, too. These requests have an `Origin`
    header. If DNS resolves the page's host name to this machine (DNS rebinding), their `Host` is
    that name.

    Args:
        token: Required as `Authorization: Bearer TOKEN`; "" requires none.
        hosts: Host names of this server, besides localhost and the machine's name. An IP address
            as `Host` is always accepted.
        is_page: Whether a browser shows the answers: the token is in the query, as `token`.
    """
    names, logged = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}, set[str]()

    def refuse(request: web.Request, status: int, why: str) -> web.Response:
        peer = str(request.remote)
        if peer not in logged and len(logged) < 100:
            logged.add(peer)
            logger.warning("request refused", peer=peer, path=request.path, why=why)
        return web.json_response({"error": {"message": why, "code": status}}, status=status)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := refusal_of_page(request, names):
            return refuse(request, 403, why)
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        sent = request.query.get("token", "") if is_page else sent
        is_known = hmac.compare_digest(sent.encode(errors="surrogateescape"), token.encode())
        if token and not is_known and request.path not in OPEN:
            why = f"the {'' if is_page else 'bearer '}token is missing, or is not this server's"
            return refuse(request, 403 if is_page else 401, why)
        return await handler(request)

    return check


def refusal_of_page(request: web.Request, names: set[str]) -> str:
    """Return why a request may be of a web page, or ""; `names` are the host's own names."""
    if "Origin" in request.headers:
        return "requests of web pages are refused"
    if not _is_own(request.headers.get("Host", ""), names):
        return "the Host header is not a name of this server"
    return ""


def _is_own(host: str, names: set[str]) -> bool:
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    return False
