"""Runs a program as a client: a folder of its own, no other settings, a time limit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping

from clients.tools import Job

SECONDS = 240.0


async def run(job: Job, command: list[str], environment: Mapping[str, str]) -> str:
    """Run a program in the job's folder; return its output.

    Raises:
        RuntimeError: The program failed; its last output is in the message.
    """
    home = os.path.join(job.folder, "home")
    os.makedirs(home, exist_ok=True)
    basic = {"HOME": home, "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "dumb"}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=job.folder,
        env={**basic, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"{command[0]} exited {process.returncode}: {output.decode()[-3000:]}")
    return output.decode()
