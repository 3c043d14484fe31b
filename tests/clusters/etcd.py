"""A real etcd on free ports of this machine, in a folder of the test."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from arealite.impl.launcher.processes import free_port
from tests.waiting import until

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed (apt-get install etcd-server)"
)


class Etcd:
    """One etcd that may be killed and started again, with its data or without."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._peers = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, forgets: bool = False) -> None:
        if forgets:
            shutil.rmtree(self.folder / "data")
        peers = f"http://127.0.0.1:{self._peers}"
        command = ["etcd", "--name=one", f"--data-dir={self.folder / 'data'}"]
        command += [f"--listen-client-urls=http://{self.address}"]
        command += [f"--advertise-client-urls=http://{self.address}"]
        command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        command += [f"--initial-cluster=one={peers}"]
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self.is_healthy, what=lambda: f"etcd: {(self.folder / 'etcd.log').read_text()}")

    def is_healthy(self) -> bool:
        with suppress(OSError), closing(HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request("GET", "/health")
            with connection.getresponse() as response:
                return json.loads(response.read())["health"] == "true"
        return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def etcd(folder: Path) -> Iterator[Etcd]:
    """Hold a healthy etcd for the body's time."""
    server = Etcd(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
