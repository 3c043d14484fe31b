"""Containers of a rollout worker, each with an environment server: `env.runtime.type=docker`.

A container is removed when it crashes or hangs, when the environment is closed, and when the worker
exits. If even the guard of a container was killed, the next start of the trial removes it.
"""

import asyncio
import os
import secrets
import subprocess
from contextlib import suppress
from pathlib import Path

import aiohttp

from arealite.api.runtime import RuntimeConfig
from arealite.base.errors import DeadlineError, UserError
from arealite.ext.hosting.client.child_servers import START_S, TERMINATE_S, Children, Running
from arealite.ext.hosting.client.server_pool import PROBE_S, parse
from arealite.ext.hosting.client.session_channel import ServerState
from arealite.impl.launcher import processes
from arealite.impl.launcher.processes import Child, end_all, free_port, how_ended, spawn
from arealite.system.health.waits import Wait

LABEL = "arealite"
"""Label of all containers; the value is the experiment and the trial."""
CONTAINER = "AREALITE_CONTAINER"
COMMAND_S = 60.0
"""Timeout of each command but `docker run`."""
REMOVE = f'exec "$1" rm --force "${CONTAINER}" >/dev/null 2>&1'
GUARD = processes.GUARD.replace("kill -9 0", REMOVE)
"""Shell script that removes the container when the worker's end of the pipe closes."""


def check_docker(config: RuntimeConfig) -> None:
    """Check that Docker runs and has the image.

    Raises:
        UserError: Docker does not run, or lacks the image.
    """
    if not config.image or config.image.startswith("-"):
        raise UserError(
            f"env.runtime.image='{config.image}': "
            "runtime.type=docker needs the name of an image that serves OpenEnv. "
            "Set env.runtime.image=NAME."
        )
    try:
        docker(config, "image", "inspect", config.image)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"env.runtime.type=docker: `{config.docker} image inspect {config.image}` failed: "
            f"{_failure_reason(error)}. "
            "Start Docker (or set env.runtime.docker=podman) and pull or build the image; "
            "without Docker, use runtime.type=subprocess or remote."
        ) from error


def _failure_reason(error: OSError | subprocess.SubprocessError) -> str:
    """Return the last line of the stderr of a failed command, or of the error if it has none."""
    report = str(error)
    if isinstance(error, subprocess.CalledProcessError):  # else its stderr is bytes
        report += f"\n{error.stderr}"
    return report.strip().splitlines()[-1].rstrip(".?")


def docker(config: RuntimeConfig, *words: str) -> str:
    """Run a command of Docker; return its output.

    Raises:
        OSError: Docker is not installed.
        subprocess.SubprocessError: The command failed or timed out.
    """
    return subprocess.run(
        [config.docker, *words], check=True, capture_output=True, text=True, timeout=COMMAND_S
    ).stdout


class Containers(Children):
    """Keeps `runtime.processes` containers running and registered in the server pool."""

    async def start(self) -> None:
        """Remove containers of dead workers of the trial, then start the first ones.

        Raises:
            UserError: Docker or the image is missing, or a server did not start.
        """
        self.max_memory_mb = 0  # Docker enforces the limit
        self._label = f"{LABEL}={self.args.experiment_name}/{self.args.trial_name}"
        await asyncio.to_thread(self._remove_leftovers)
        await super().start()

    def _remove_leftovers(self) -> None:
        check_docker(self.runtime)
        names = docker(
            self.runtime,
            "ps",
            "--all",
            f"--filter=label={self._label}",
            "--format={{.Names}}",
        )
        for name in names.split():
            _, worker_pid, *_ = name.split("-")
            if not Path("/proc", worker_pid).exists():
                with suppress(subprocess.SubprocessError):  # its guard is removing it
                    docker(self.runtime, "rm", "--force", name)

    async def _launch(self) -> tuple[Child, str]:
        """Start a container; return it and its address when the server answers."""
        runtime = self.runtime
        address = f"127.0.0.1:{free_port()}"
        name = f"arealite-{os.getpid()}-{secrets.token_hex(4)}"
        words = [
            runtime.docker,
            "run",
            "--rm",
            "--pull=never",
            f"--name={name}",
            f"--label={self._label}",
            f"--publish={address}:{runtime.port}",
        ]
        if runtime.max_memory_mb:
            words.append(f"--memory={runtime.max_memory_mb}m")
        if runtime.token_env:
            words.append(f"--env={runtime.token_env}")
        words += [*runtime.docker_args, runtime.image]
        child = await spawn(
            name,
            words,
            log=None,
            environment={CONTAINER: name},
            guard=GUARD,
        )
        try:
            await self._wait_for_answer(child, address)
        except BaseException as error:
            await self._end(child)
            if isinstance(error, DeadlineError | UserError):
                raise UserError(
                    f"a container of env.runtime.image={runtime.image} does not answer /health "
                    f"at port {runtime.port} (env.runtime.port): {error}."
                ) from error
            raise
        return child, address

    async def _wait_for_answer(self, child: Child, address: str) -> None:
        with Wait(event="its server", owner="collector", on=self.name, seconds=START_S):
            while not await self._answers(address):
                if not child.running:
                    raise UserError(f"{how_ended(child.code)}; its error is in the log above")
                await asyncio.sleep(PROBE_S)

    async def _answers(self, address: str) -> bool:
        with suppress(aiohttp.ClientError, OSError, EOFError):
            return bool(await self._servers.get(ServerState(url=parse(address)), "health"))
        return False

    async def _remove(self, child: Running) -> None:
        await super()._remove(child)
        await self._end(child.process)

    async def _end(self, child: Child) -> None:
        await end_all([child], grace_s=TERMINATE_S)
        with suppress(subprocess.SubprocessError, OSError):  # it has removed itself
            await asyncio.to_thread(docker, self.runtime, "rm", "--force", child.name)
