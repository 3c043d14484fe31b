"""Ports of loopback that are known before anybody listens on them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Give a port on which the test's servers may listen, one after the other, and nobody else:
    the system gives no port away that a socket has, though it does not listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those servers' sockets
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
