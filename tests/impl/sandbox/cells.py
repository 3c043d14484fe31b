"""Sandboxes of every kind that this host can give, and a look at what a program left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest

from arealite.api.sandbox import SandboxConfig
from arealite.impl.sandbox import process
from arealite.impl.sandbox.process import ProcessSandbox

BACKENDS = ["bwrap", "landlock"]
CONFINED = [*BACKENDS, *(f"{name} as a user" for name in BACKENDS)]
SETPRIV = "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"
SMALL = {"timeout_s": 60.0, "processes": 16}


class AsUser(ProcessSandbox):
    """What an ordinary user's sandbox is; for tests that run as root."""

    def __init__(self, config: SandboxConfig, backend: str) -> None:
        system = SimpleNamespace(base_prefix="/usr", executable="/usr/bin/python3")
        with patch.object(process, "sys", system), patch.object(os, "getuid", lambda: 1):
            super().__init__(config, backend)
        self.command = [*SETPRIV, *self.command]


def cell(name: str, **options: object) -> ProcessSandbox:
    """Return a sandbox, or skip the test for the reason why this host cannot give it."""
    config = SandboxConfig(**SMALL | options)
    backend, _, user = name.partition(" ")
    if user and os.getuid() != 0:
        pytest.skip("every sandbox of this run is an ordinary user's")
    made = (AsUser if user else ProcessSandbox)(config, backend)
    problem = probe(name, made)
    if problem:
        pytest.skip(f"this host cannot confine by {name}: {problem}")
    return made


def probe(name: str, sandbox: ProcessSandbox, known: dict[str, str] = {}) -> str:  # noqa: B006
    """Try a kind of sandbox once a session."""
    if name not in known and name.endswith("user"):
        ask = ["/usr/bin/python3", "-c", "import sys; print(sys.version_info[:2])"]
        version = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
        if version != str(sys.version_info[:2]):
            known[name] = f"the system's Python, which every user may run, is {version or 'absent'}"
    if name not in known:
        known[name] = sandbox.probe()
    return known[name]


def left(mark: str) -> list[str]:
    """Return processes that have `mark` on the command line (forks have their parent's), and
    zombies of this one."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in each.read_bytes():
                found.append(each.parent.name)
        except OSError:
            continue
    return found + [f"zombie {c.pid}" for c in psutil.Process().children() if is_zombie(c)]


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
