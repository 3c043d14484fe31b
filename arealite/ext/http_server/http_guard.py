"""Refuses HTTP requests of web pages and requests without the token.

Embedded servers, environment servers and the live page use it.
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
MAX_LOGGED_PEERS = 100
"""Peers whose first refused request is logged."""


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
    host_names = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}
    logged_peers = set[str]()

    def refuse(request: web.Request, status: int, reason: str) -> web.Response:
        peer = str(request.remote)
        if peer not in logged_peers and len(logged_peers) < MAX_LOGGED_PEERS:
            logged_peers.add(peer)
            logger.warning("request refused", peer=peer, path=request.path, why=reason)
        error = {"message": reason, "code": status}
        return web.json_response({"error": error}, status=status)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        page_refusal = refusal_of_page(request, host_names)
        if page_refusal:
            return refuse(request, 403, page_refusal)
        if not token or request.path in OPEN:
            return await handler(request)
        if is_page:
            has_token = _is_equal(request.query.get("token", ""), token)
            status = 403
            token_name = "token"
        else:
            has_token = _is_equal(_bearer_token(request), token)
            status = 401
            token_name = "bearer token"
        if not has_token:
            reason = f"the {token_name} is missing, or is not this server's"
            return refuse(request, status, reason)
        return await handler(request)

    return check


def _bearer_token(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _is_equal(sent_token: str, token: str) -> bool:
    """Compare two tokens in a time that does not depend on their common prefix."""
    sent_bytes = sent_token.encode(errors="surrogateescape")
    return hmac.compare_digest(sent_bytes, token.encode())


def refusal_of_page(request: web.Request, host_names: set[str]) -> str:
    """Return the reason why a request may be of a web page, or "".

    Args:
        request: The request.
        host_names: The names of this host. An IP address as `Host` is always accepted.
    """
    if "Origin" in request.headers:
        return "requests of web pages are refused"
    if not _is_this_host(request.headers.get("Host", ""), host_names):
        return "the Host header is not a name of this server"
    return ""


def _is_this_host(host: str, host_names: set[str]) -> bool:
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name in host_names or bool(ipaddress.ip_address(name))
    return False
