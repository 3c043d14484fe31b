"""Server programs of this host: checks of the options, start and end of all servers.

The servers may run in another Python, because their packages pin versions that AReaLite does not
use.
"""

import asyncio
import os
import subprocess
import sys
from abc import abstractmethod
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from arealite.api.experiment_config import ServerConfig, run_paths
from arealite.api.llm_server import LLMServer
from arealite.api.server_protocol import Json
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.base.folder_checks import check_address, check_folder
from arealite.base.model_folder import read_json, vocab_size
from arealite.base.signals import on_stop
from arealite.ext.server_processes.config import ServerProcessOptions
from arealite.ext.server_processes.server_process import Launch, ServerProcess, ServerProgram
from arealite.impl.http_client import Pool
from arealite.impl.launcher.processes import take_ports

logger = log.get(__name__)

PROBE = """
import importlib.metadata, importlib.util, sys
package, device = sys.argv[1:]
if importlib.util.find_spec(package) is None:
    sys.exit(f"it has no {package}")
num_gpus = 0
if device != "cpu":
    import torch
    num_gpus = torch.cuda.device_count()
versions = [each.version for each in importlib.metadata.distributions(name=package)]
print(num_gpus, *versions[:1])
"""
PROBE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ProbedPython:
    """Facts about a Python that has a program."""

    path: str
    num_gpus: int
    """Number of GPUs that its torch finds; 0 with device=cpu."""
    program_version: str
    """"": unknown."""


class ServerGroup(LLMServer):
    """Starts `num_servers` servers of one program, each with its port, devices and log."""

    program: ClassVar[ServerProgram]

    def __init__(self, args: ServerConfig) -> None:
        self.config = args
        self.options: Any = args.llm_server.selected_options

    @abstractmethod
    def command(self, python: str, index: int, *, is_cpu: bool, port: int) -> list[str]:
        """Return the command line of server number `index`."""

    @abstractmethod
    def environment(self, devices: str | None) -> dict[str, str]:
        """Return a server's environment variables, with those of this process.

        Args:
            devices: Value of CUDA_VISIBLE_DEVICES; None: the server runs on the CPU.
        """

    def check(self, python: ProbedPython, model: Json, *, is_cpu: bool) -> None:
        """Check the program and the model's config.json.

        Raises:
            UserError: the program cannot serve the model here.
        """

    async def serve(self) -> None:
        """Run all servers until a stop signal. A second signal skips the wait for requests.

        Raises:
            UserError: the config is invalid, or a server was never healthy.
            RoleError: all servers were given up.
        """
        launches = await asyncio.to_thread(self.plan)
        loop = asyncio.get_running_loop()
        tasks = list[asyncio.Task[None]]()

        def stop(number: int) -> None:
            for task in tasks:
                task.cancel()

        on_stop(loop, stop)  # until the end of the loop
        with closing(Pool(PROBE_S)) as pool:
            async with asyncio.TaskGroup() as group:
                for launch in launches:
                    server = ServerProcess(launch, self.config, pool)
                    tasks.append(group.create_task(server.run(), name=f"llm_server:{launch.port}"))
        given_up = [task.get_name() for task in tasks if not task.cancelled()]
        if len(given_up) == len(tasks):
            raise RoleError(
                f"every {self.program.title} server died repeatedly; the first errors are above."
            )
        if given_up:
            logger.error("servers had been given up before the stop", servers=given_up)

    def plan(self) -> list[Launch]:
        """Check the config, and return how to start each server.

        Raises:
            UserError: the config contradicts itself, or does not fit the Python, the model or this
                machine.
        """
        options: ServerProcessOptions = self.options
        ports = find_ports(self.config)
        model = read_model_config(self.config)
        python = os.path.expanduser(options.python or sys.executable)
        probed = probe(self.program, python, options.device)
        devices = assign_devices(self.config, self.program, probed.num_gpus)
        is_cpu = devices is None
        self.check(probed, model, is_cpu=is_cpu)
        logs = run_paths(self.config).logs
        check_folder(logs, "the servers' folder of logs", "cluster.run_root")
        logs.mkdir(parents=True, exist_ok=True)
        launches: list[Launch] = []
        for index, port in enumerate(ports):
            launch = Launch(
                command=partial(self._command_at, python, index, is_cpu),
                environment=self.environment(devices[index] if devices else None),
                port=port,
                logs=logs,
                metadata=describe(self.config, self.program, model),
                program=self.program,
            )
            launches.append(launch)
        return launches

    def _command_at(self, python: str, index: int, is_cpu: bool, port: int) -> list[str]:
        return self.command(python, index, is_cpu=is_cpu, port=port)


def model_folder(config: ServerConfig) -> Path:
    """Return the absolute path of the model's folder."""
    return Path(config.model.path or "").expanduser().absolute()


def read_model_config(config: ServerConfig) -> Json:
    """Return config.json of the model.

    Raises:
        UserError: there is no model.
    """
    path = config.model.path
    if not path:
        raise UserError("model.path is empty. Give a Hugging Face folder: model.path=/my/model")
    model = read_json(model_folder(config))
    if not model:
        raise UserError(
            f"model.path={path}: no model there (no config.json that can be read). "
            "Give a Hugging Face folder."
        )
    return model


def describe(config: ServerConfig, program: ServerProgram, model: Json) -> dict[str, object]:
    """Return the constant part of the content of the servers' names."""
    return {
        "type": program.package,
        "protocol": program.package,
        "model_path": str(model_folder(config)),
        "model_type": model.get("model_type"),
        "architectures": model.get("architectures") or [],
        "vocab_size": vocab_size(model),
        "host": config.cluster.host,
    }


def probe(program: ServerProgram, python: str, device: str) -> ProbedPython:
    """Return the facts about a Python that has the program.

    Raises:
        UserError: `python` cannot be run, or does not have the program.
    """
    package = program.package
    try:
        process = subprocess.run(
            [python, "-c", PROBE, package, device],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
        if process.returncode == 0:
            num_gpus, *versions = process.stdout.split()
            version = versions[0] if versions else ""
            return ProbedPython(
                path=python,
                num_gpus=int(num_gpus),
                program_version=version,
            )
        error_lines = process.stderr.strip().splitlines()
        failure_reason = error_lines[-1] if error_lines else f"exit code {process.returncode}"
    except OSError as error:
        failure_reason = error.strerror
    except (ValueError, subprocess.TimeoutExpired) as error:
        failure_reason = str(error)
    raise UserError(
        f"llm_server.{package}.python: {python} cannot run {program.title}: {failure_reason}. "
        f"Name a Python that has it (for a CPU, {program.setup_script} makes one), "
        f"or pip install {package} there."
    )


def assign_devices(config: ServerConfig, program: ServerProgram, count: int) -> list[str] | None:
    """Return CUDA_VISIBLE_DEVICES of each server; None: the servers run on the CPU.

    Args:
        config: Config of the servers.
        program: The program that they run.
        count: Number of GPUs of this machine.

    Raises:
        UserError: there are too few GPUs.
    """
    options: ServerProcessOptions = config.llm_server.selected_options
    if options.device == "cpu" or (options.device == "auto" and not count):
        return None
    gpus_per_server = options.tp * options.dp
    num_needed = options.num_servers * gpus_per_server
    if num_needed > count:
        raise UserError(
            f"llm_server.{program.package}: {options.num_servers} servers "
            f"of tp {options.tp} x dp {options.dp} "
            f"need {num_needed} GPUs, but {count} are visible. "
            "Lower one of them, widen CUDA_VISIBLE_DEVICES, or take device=cpu."
        )
    gpu_ids = [str(i) for i in range(count)]
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices:
        gpu_ids = visible_devices.split(",")
    devices_of_servers: list[str] = []
    for index in range(options.num_servers):
        first_gpu = index * gpus_per_server
        gpu_ids_of_server = gpu_ids[first_gpu : first_gpu + gpus_per_server]
        devices_of_servers.append(",".join(gpu_ids_of_server))
    return devices_of_servers


def find_ports(config: ServerConfig) -> list[int]:
    """Return one free port for each server.

    Raises:
        UserError: a port is in use, or is not between 0 and 65535.
    """
    server = config.llm_server
    count: int = server.selected_options.num_servers
    for index in range(count):
        port = server.port + index if server.port else 0
        check_address(server.host, port, at="llm_server")
    return take_ports(server.host, server.port, count)
