"""Sandboxes of root and of an ordinary user; a search for processes that a program left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest

from arealite.ext.sandbox import sandbox as process
from arealite.ext.sandbox.config import SandboxConfig, SandboxFailed
from arealite.ext.sandbox.sandbox import PROBE, Sandbox, outcome, request

SETPRIV = "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"
SMALL = {"timeout_s": 60.0, "processes": 16}


class AsUser(Sandbox):
    """The sandbox of an ordinary user, for tests that run as root."""

    def __init__(self, config: SandboxConfig) -> None:
        system = SimpleNamespace(base_prefix="/usr", executable="/usr/bin/python3")
        with patch.object(process, "sys", system), patch.object(os, "getuid", lambda: 1):
            super().__init__(config)
        self.command = [*SETPRIV, *self.command]


def cell(name: str = "bwrap", **options: object) -> Sandbox:
    """Return a sandbox; skip the test, with the reason, if this host cannot provide it."""
    config = SandboxConfig(**SMALL | options)
    user = name.partition(" ")[2]
    if user and os.getuid() != 0:
        pytest.skip("every sandbox of this run is an ordinary user's")
    made = (AsUser if user else Sandbox)(config)
    problem = probe(name, made)
    if problem:
        pytest.skip(f"this host cannot confine by {name}: {problem}")
    return made


def tried(sandbox: Sandbox) -> str:
    """Run a program that forks; return "" or the reason of its failure."""
    data = request(PROBE, "")
    try:
        done = subprocess.run(
            sandbox.command, input=data, env=process.ENVIRONMENT, capture_output=True, check=False
        )
        return outcome(done.stdout, done.stderr).stderr
    except (SandboxFailed, OSError) as error:
        return str(error)


def probe(name: str, sandbox: Sandbox, known: dict[str, str] = {}) -> str:  # noqa: B006
    """Return "" or why this host cannot provide the sandbox `name`; try it once per session."""
    if name not in known and name.endswith("user"):
        ask = ["/usr/bin/python3", "-c", "import sys; print(sys.version_info[:2])"]
        version = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
        if version != str(sys.version_info[:2]):
            known[name] = f"the system's Python, which every user may run, is {version or 'absent'}"
    if name not in known:
        known[name] = tried(sandbox)
    return known[name]


def left(mark: str) -> list[str]:
    """Return processes with `mark` on their command line, and zombie children of this process.

    A forked process has the command line of its parent.
    """
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
