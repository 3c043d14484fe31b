"""Reserves loopback ports for servers of a test before they listen."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Reserve a port for the servers of a test.

    A bound socket that does not listen holds the port, so the system gives it to no other process.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers' sockets
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
