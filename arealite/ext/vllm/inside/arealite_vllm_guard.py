"""Guards all paths of a vLLM server: token, requests of web pages, size of bodies.

vLLM loads the class into its HTTP process: `--middleware arealite_vllm_guard.Guard`. Its own
--api-key protects only some paths, and `ps` shows it. The token is derived from the trial's secret,
a file that the environment variable AREALITE_SECRET_FILE names. Without the variable, the server
takes requests without a token, as a trial on loopback without a secret does. The guard must be the
last --middleware, so that it runs first.
"""

import hmac
import ipaddress
import os
import re
import socket
import stat
from contextlib import suppress
from urllib.parse import urlsplit

from arealite_vllm_gate import (
    Application,
    Message,
    ReceiveMessage,
    SendMessage,
    UpdateGate,
    send_error,
)

SECRET_VARIABLE = "AREALITE_SECRET_FILE"
SECRET_DIGITS = re.compile(r"([0-9a-f]{64})\s*")
OPEN = ("GET", "/health")
"""Method and path of the only request that needs no token."""
MAX_BODY = 2**26
"""Bytes of a body. The largest body has the names and shapes of all tensors of a model."""
WEBSOCKET_POLICY_VIOLATION = 1008


def read_token(path: str) -> str:
    """Return the token of a trial's HTTP servers, derived from its secret; "" without a path.

    Raises:
        SystemExit: The file is not a secret, or other users can read it.
    """
    if not path:
        return ""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii") as file:
            status = os.fstat(file.fileno())
            digits = file.read(1024)
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{SECRET_VARIABLE}={path} cannot be read: {error}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise SystemExit(f"{SECRET_VARIABLE}={path} must be yours and of mode 0600. Run chmod 600.")
    secret = SECRET_DIGITS.fullmatch(digits)
    if secret is None:
        raise SystemExit(
            f"{SECRET_VARIABLE}={path} is not a secret of 32 bytes. Name another file."
        )
    key = bytes.fromhex(secret[1])
    return hmac.digest(key, b"http", "sha256").hex()


TOKEN = read_token(os.environ.get(SECRET_VARIABLE, ""))
"""Read at the import: vLLM continues if a middleware fails later."""


class Guard:
    """ASGI middleware that refuses foreign requests before every other part of the server."""

    def __init__(self, app: Application, token: str = TOKEN) -> None:
        self._app = UpdateGate(app)
        self._token = token.encode()
        self._host_names = {"localhost", socket.gethostname().lower()}

    async def __call__(self, scope: Message, receive: ReceiveMessage, send: SendMessage) -> None:
        if scope["type"] not in ("http", "websocket"):  # start and stop of the server
            await self._app(scope, receive, send)
            return
        status, reason = self._refusal(scope)
        if not status:
            await self._app(scope, limited(receive), send)
        elif scope["type"] == "http":
            await send_error(send, status, reason)
        else:
            await send({"type": "websocket.close", "code": WEBSOCKET_POLICY_VIOLATION})

    def _refusal(self, scope: Message) -> tuple[int, str]:
        """Return status and reason if a request must be refused; (0, "") if not."""
        headers = first_values(scope)
        if b"origin" in headers:
            return 403, "requests of web pages are refused"
        if not self._token and not self._is_this_host(headers.get(b"host", b"")):
            # A web page whose host name resolves to this machine (DNS rebinding).
            return 403, "the Host header is not a name of this server"
        body_bytes = headers.get(b"content-length", b"0")
        if not body_bytes.isdigit() or int(body_bytes) > MAX_BODY:
            return 413, f"the body has more than {MAX_BODY} bytes"
        if not self._token or (scope.get("method"), scope["path"]) == OPEN:
            return 0, ""
        sent_token = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not hmac.compare_digest(sent_token, self._token):
            return 401, "the bearer token is missing, or is not this server's"
        return 0, ""

    def _is_this_host(self, host: bytes) -> bool:
        with suppress(ValueError):
            name = urlsplit(f"//{host.decode('ascii')}").hostname or ""
            return name in self._host_names or bool(ipaddress.ip_address(name))
        return False


def first_values(scope: Message) -> dict[bytes, bytes]:
    """Return the first value of each header by its name in lower case."""
    values = dict[bytes, bytes]()
    for name, value in scope["headers"]:
        values.setdefault(name.lower(), value)
    return values


def limited(receive: ReceiveMessage) -> ReceiveMessage:
    """Return a `receive` that ends the connection when a body exceeds MAX_BODY."""
    received_bytes = 0

    async def receive_limited() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > MAX_BODY:
            return {"type": "http.disconnect"}
        return message

    return receive_limited
