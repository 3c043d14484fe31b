"""Runs the program of each episode in a new folder, and confines it if `sandbox` is set.

When its stdin closes, the first process of a program kills all others. So nothing is left of a
program that is cancelled, or whose worker dies. Without the sandbox, a process that starts a
session of its own escapes.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.base.files import make_locked
from arealite.base.proxies import bypass_proxies
from arealite.ext.gateway.session import Endpoint
from arealite.ext.harness import confined
from arealite.ext.harness.config import HarnessConfig
from arealite.ext.sandbox.sandbox import bubblewrap, spawn, stop
from arealite.impl.launcher.processes import GUARD, how_ended

AT = "env.harness."
KEPT = 1 << 16
"""Bytes at the end of a program's stdout and stderr that are kept."""
SHOWN_LINES = 8
PIPES_S = 1.0
"""Time for which a process that escaped can hold the output open after the program's end."""
MAX_FILE = 1 << 20
DISK = 1 << 30
"""Bytes of files outside its folder that a confined program can keep, in memory."""
INSIDE = "/tmp/episode"
"""Path of the folder in the sandbox."""
SOCKET = "/tmp/gateway.sock"
"""Path of the gateway in the sandbox."""
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "CUDA_HOME")
"""Variables of the worker that programs get."""
READABLE = ("passwd", "group", "hosts", "nsswitch.conf", "alternatives", "ssl/certs")
"""Files in /etc that confined programs can read."""


class HarnessFailed(EpisodeError, failure_class="harness_failed"):
    """The agent raised an exception, exited with an error, or gave no reward that can be read."""


class FinishedProgram(NamedTuple):
    """A program that has ended."""

    folder: Path
    stdout_tail: str
    """The end of its stdout, without white space around it."""

    def read(self, name: str) -> str | None:
        """Return the text of a file in the folder; None if there is no such regular file."""
        file = self.folder / name  # a program could leave a pipe, which blocks, or a link
        if file.is_symlink() or not file.is_file():
            return None
        with file.open("rb") as opened:
            return opened.read(MAX_FILE).decode(errors="replace")


class Programs:
    """Starts the programs of all episodes."""

    def __init__(self, config: HarnessConfig) -> None:
        """Check that the program and bubblewrap are installed.

        Raises:
            UserError: They are not.
        """
        self.config = config
        needed = {config.command[0]: "write the path of the program"}
        if config.sandbox:
            needed["bwrap"] = "set sandbox=false"
        for program, alternative in needed.items():
            if "{" not in program and not shutil.which(program):
                raise UserError(
                    f"env.harness: the program {program} is not installed. "
                    f"Install it, or {alternative}."
                )

    async def setup(self, cleanup: AsyncExitStack) -> None:
        """Make the folder of all episodes; remove the folders that killed workers left."""
        parent = Path(tempfile.gettempdir())
        prefix = f"arealite-harness-{os.getuid()}-"
        self._root, lock = await asyncio.to_thread(make_locked, parent, prefix)
        cleanup.callback(os.close, lock)
        cleanup.callback(shutil.rmtree, self._root, ignore_errors=True)

    @property
    def socket(self) -> str:
        """Path at which the gateway must listen for confined programs; "": there are none."""
        if not self.config.sandbox:
            return ""
        return str(self._root / "gateway.sock")

    @asynccontextmanager
    async def run(self, task: Task, endpoint: Endpoint) -> AsyncGenerator[FinishedProgram]:
        """Run the program of an episode; remove its folder at the end of the body.

        Yields:
            The program after its end.

        Raises:
            HarnessFailed: The program cannot be started, or its exit code is not in `ok_codes`.
            UserError: A word of the command has an unknown placeholder.
        """
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._root))
        try:
            await asyncio.to_thread(self._write_task, folder, task, endpoint)
            inside = INSIDE if self.config.sandbox else str(folder)
            words = self.config.check_task(task, inside)
            if self.config.sandbox:
                port = urlsplit(endpoint.base_url).port
                command = self._confine(words, folder, port)
            else:
                command = ["/bin/sh", "-c", GUARD, "sh", *words]
            environment = self._environment(endpoint, inside)
            yield await self._run(command, folder, environment)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _write_task(self, folder: Path, task: Task, endpoint: Endpoint) -> None:
        """Write task.json. The ground truth is left out unless the program gives the reward: the
        model may be able to read files."""
        api_keys = {seat: seat_endpoint.api_key for seat, seat_endpoint in endpoint.seats.items()}
        fields = {
            "task_id": task.task_id,
            "prompt": task.prompt,
            "extra_info": task.extra_info,
            "columns": task.columns,
            "keys": api_keys,
        }
        if self.config.reward_from in ("file", "last_line", "posted"):
            fields["ground_truth"] = task.ground_truth
        file = folder / "task.json"
        file.write_bytes(msgspec.json.encode(fields))

    def _environment(self, endpoint: Endpoint, folder: str) -> dict[str, str]:
        """Return the environment of a program: few variables of the worker, and its endpoint."""
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment = inherited | {
            "HOME": folder,
            "TASK": f"{folder}/task.json",
            "AREALITE_TASK": f"{folder}/task.json",
            "AREALITE_SESSION": f"{endpoint.base_url}/rl/sessions/current",
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": endpoint.model,
            "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
            "ANTHROPIC_API_KEY": endpoint.api_key,
            "ANTHROPIC_MODEL": endpoint.model,
        }
        for name, template in self.config.environment.items():
            environment[name] = os.path.expandvars(template)
        gateway_host = urlsplit(endpoint.base_url).hostname or ""
        bypass_proxies(gateway_host, environment=environment)
        return environment

    async def _run(
        self, words: list[str], folder: Path, environment: dict[str, str]
    ) -> FinishedProgram:
        try:
            process = await spawn(words, cwd=folder, env=environment)
        except OSError as error:
            raise HarnessFailed(f"the program cannot be started: {error}") from error
        assert process.stdout and process.stderr
        stdout = bytearray()
        stderr = bytearray()
        readers = [
            asyncio.create_task(keep_tail(process.stdout, stdout)),
            asyncio.create_task(keep_tail(process.stderr, stderr)),
        ]
        try:
            code = await process.wait()
        finally:
            await stop(process)
            await asyncio.wait(readers, timeout=PIPES_S)
            for reader in readers:
                reader.cancel()
        stdout_tail = stdout.decode(errors="replace").strip()
        stderr_tail = stderr.decode(errors="replace").strip()
        if code not in self.config.ok_codes:
            output_lines = (stderr_tail or stdout_tail).splitlines()
            last_lines = "\n".join(output_lines[-SHOWN_LINES:])
            raise HarnessFailed(f"{how_ended(code)}: {last_lines}")
        return FinishedProgram(folder, stdout_tail)

    def _confine(self, words: list[str], folder: Path, port: int | None) -> list[str]:
        """Return the command that runs `words` in bubblewrap, with the gateway at `port`."""
        binds = ["--bind", str(folder), INSIDE]
        binds += ["--bind", self.socket, SOCKET]
        binds += ["--cap-drop", "ALL"]
        readable = [os.path.abspath(os.path.expanduser(path)) for path in self.config.readable]
        readable.append(sys.base_prefix)
        readable += [f"/etc/{name}" for name in READABLE]
        sandbox = bubblewrap(readable, DISK, binds=binds, folder=INSIDE)
        interpreter = os.path.realpath(sys.executable)
        source = Path(confined.__file__).read_text()
        python = [interpreter, "-I", "-S", "-c", source]
        return [*sandbox, *python, SOCKET, str(port), *words]


async def keep_tail(pipe: asyncio.StreamReader, tail: bytearray) -> None:
    """Read a pipe to its end; keep its last KEPT bytes."""
    while chunk := await pipe.read(KEPT):
        tail += chunk
        del tail[:-KEPT]
