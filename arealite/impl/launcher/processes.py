"""Child processes of this machine: each leads a session, and is killed with its parent.

Without an extension, each role is a new process. An entry of the group `role_starter`, an object or
a module with the functions of `RoleStarters`, can start roles in another way. The last entry is
used, so another package's replaces AReaLite's.
"""

import asyncio
import gc
import json
import os
import random
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base import entries, exit_record
from arealite.base.errors import UserError
from arealite.base.exit_record import ERROR, ExitRecord
from arealite.base.signals import ignore_other_stops, kill_with_parent

if TYPE_CHECKING:
    from arealite.api.hooks import ServerOverrides
    from arealite.api.launcher_hooks import ExitReason

PARENT = "AREALITE_PARENT"
"""Environment variable with the id of the parent process that restarts this one."""
IS_KEPT = "AREALITE_IS_KEPT"
"""Environment variable of a server whose parent restarts it."""
GUARD = """
exec 3<&0 </dev/null
(trap '' HUP INT TERM; read -r _ <&3; kill -9 0) &
exec "$@" 3<&-
"""
"""Shell script in a child's process group. It kills the whole group when the parent's end of the
pipe closes. A death signal from the kernel would not reach grandchildren."""
TERMINATE_GRACE_S = 5.0
"""Seconds between the request to exit and SIGKILL."""
TAIL_LINES = 25
TAIL_BYTES = 1 << 16


class ChildProcess(Protocol):
    """The part of asyncio's processes that a supervisor uses."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


@dataclass(kw_only=True)
class Child:
    """One child process."""

    name: str
    process: ChildProcess
    log: Path | None
    """None: the process writes to the output of its parent."""
    log_begin: int
    """Length of the log, in bytes, when the process started."""
    record: Path | None = None
    """File in which the process writes why it failed; None: only its log says it."""
    started: float = field(default_factory=time.monotonic)
    reason: str = ""
    """Reason for which the supervisor killed the process."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def code(self) -> int:
        """The exit code; after a death by signal, the signal's number below zero.

        srun reports a death by signal as 128 plus the number. AReaLite itself exits with 130.
        """
        code = self.process.returncode or 0
        return 128 - code if code > 130 else code

    def send(self, number: int) -> None:
        """Send a signal to the process.

        `subprocess` is not used: it polls the process first, and asyncio loses the exit code.
        """
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def exit_summary(self) -> str:
        """One line: the child's name, how it exited, and the reason, if it gave one."""
        return self._summary(self._own_reason() if self.code else "")

    @property
    def failure_record(self) -> ExitRecord | None:
        """The record of an end with an error; None after a death by signal, or without a record."""
        return exit_record.read(self.record) if self.record and self.code > 0 else None

    def _own_reason(self) -> str:
        """Return the reason that the process gave, with the prefix ERROR if it is deliberate."""
        record = self.failure_record
        if record is not None:
            return f"{ERROR}{record.reason}" if record.is_deliberate else record.reason
        readers: list[ExitReason] = entries.hooks("exit_reason")
        return entries.first_result(readers, self._output(), self.code) or ""

    def _summary(self, own_reason: str) -> str:
        reason = self.reason or own_reason.removeprefix(ERROR)
        if reason:
            return f"{self.name} died ({how_ended(self.code)}: {reason})"
        return f"{self.name} died ({how_ended(self.code)})"

    @property
    def exit_report(self) -> str:
        """The line of `exit_summary`, followed by the last lines of the log, if there is a log.

        After a deliberately raised error, only the line with the reason follows.
        """
        if self.log is None:
            return self.exit_summary
        output = self._output()
        reason = self._own_reason()
        is_deliberate = reason.startswith(ERROR)
        lines = [reason] if is_deliberate else output.splitlines()[-TAIL_LINES:]
        one_line = " ".join("\n".join(lines).split())
        if reason not in one_line:
            lines = [reason, "...", *lines]
        if not lines:
            lines = ["(empty: is the disk full?)"]
        tail = "\n".join(f"    {line}" for line in lines)
        return f"{self._summary('')}. Its last lines ({self.log}):\n{tail}"

    def _output(self) -> str:
        """Return the end of what the process wrote to its log, at most TAIL_BYTES."""
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            log_end = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_begin, log_end - TAIL_BYTES))
            return file.read().decode(errors="replace").rstrip()


async def spawn(
    name: str,
    command: Sequence[str],
    *,
    log: Path | None,
    environment: Mapping[str, str],
    stdout: int | None = None,
    guard: str = "",
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start a process. If the caller is cancelled meanwhile, the process is killed.

    Args:
        name: Name of the process in reports.
        command: Command line.
        log: The process appends its output to this file, whose folder exists. None: it writes to
            the output of this process.
        environment: Variables in addition to those of this process.
        stdout: PIPE if the caller reads the output.
        guard: Shell script, as GUARD, that runs the command and acts when its stdin closes because
            this process has exited. "": nothing happens then.
        pass_fds: File descriptors that the process inherits.

    Raises:
        UserError: the log cannot be written, or this machine can hold no more processes.
    """
    words = ["/bin/sh", "-c", guard, "sh", *command] if guard else command
    try:
        record = exit_record.new_file(log)
        variables = {PARENT: str(os.getpid()), exit_record.VARIABLE: str(record or "")}
        with log.open("ab") if log else nullcontext() as output:
            begin = output.tell() if output else 0
            creating = asyncio.create_subprocess_exec(
                *words,
                env=os.environ | environment | variables,
                # A guard's pipe stays open as long as the process object exists.
                stdin=asyncio.subprocess.PIPE if guard else asyncio.subprocess.DEVNULL,
                stdout=stdout or output,
                stderr=output,
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C reaches only the parent, which stops the children
            )
            process = await _started(asyncio.ensure_future(creating))
            return Child(
                name=name,
                process=process,
                log=log,
                log_begin=begin,
                record=record,
            )
    except OSError as error:
        raise UserError(f"{name} cannot be started: {error}") from error


async def _started(creating: asyncio.Task[Process]) -> Process:
    """Await a process that is being created; kill it if the caller is cancelled meanwhile."""
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        await asyncio.wait((creating,))
        if not creating.exception():
            os.killpg(creating.result().pid, signal.SIGKILL)
            await creating.result().wait()
        raise


async def end_all(
    children: Sequence[Child], number: int = signal.SIGTERM, *, grace_s: float = TERMINATE_GRACE_S
) -> None:
    """Send a signal to children, wait up to `grace_s`, then kill them and their children."""
    running = [child for child in children if child.running]
    for child in running:
        child.send(number)
    if running:
        exits = [asyncio.ensure_future(child.process.wait()) for child in running]
        await asyncio.wait(exits, timeout=grace_s)
    for child in children:
        child.kill()
    await asyncio.gather(*(child.process.wait() for child in children))


def die_with_parent() -> bool:
    """Make the kernel kill this process when its supervisor dies.

    Returns:
        Whether the process has a supervisor.

    Raises:
        UserError: the supervisor is dead already.
    """
    ignore_other_stops()
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return False
    if not kill_with_parent(int(parent)):
        raise UserError("the supervisor of this process exited before the process started.")
    return True


def how_ended(code: int) -> str:
    """Describe the end of a process.

    Args:
        code: Exit code, as in `Child.code`.
    """
    if code < 0:
        signal_names = {number.value: number.name for number in signal.Signals}
        signal_name = signal_names.get(-code, f"signal {-code}")
        return f"killed by {signal_name}"
    return f"exit code {code}" if code else "exited too early"


def free_port() -> int:
    """Return a loopback port that was free during the call."""
    return take_ports("127.0.0.1", 0, 1)[0]


def take_ports(host: str, port: int, count: int) -> list[int]:
    """Return `count` ports from `port` on, or any ports if it is 0; all were free during the call.

    Raises:
        OSError: a port is in use, or `host` is no address of this machine.
    """
    ports: list[int] = []
    with ExitStack() as stack:
        for index in range(count):
            wanted_port = port + index if port else 0
            server = socket.create_server((host, wanted_port))
            stack.enter_context(server)
            ports.append(server.getsockname()[1])
    return ports


def own_address() -> str:
    """Return the IP address under which other hosts reach this host.

    This is the address of the host's name. If that is a loopback address, it is the address of the
    default route; without a network, 127.0.0.1.
    """
    address = "127.0.0.1"
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # chooses a route; sends no packet
            address = str(probe.getsockname()[0])
    return address


def rank_environments(
    count: int, *, address: str = "", local: Sequence[int] = ()
) -> list[dict[str, str]]:
    """Return the environment variables by which each of `count` ranks finds the others.

    Args:
        count: Number of ranks.
        address: Host of the first rank; "": all ranks are on this host.
        local: Local rank of each rank on its host; (): equal to the rank.
    """
    # If the port is in use on another host, the next attempt chooses another one.
    port = random.randint(20_000, 29_999) if address else free_port()
    shared = {
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
    }
    local_ranks = local or range(count)
    return [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        for rank, local_rank in enumerate(local_ranks)
    ]


def threads(count: int) -> dict[str, str]:
    """Return the environment that limits maths libraries to `count` threads a process."""
    return {"OMP_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false"}


def server_gpus(
    index: int, count: int, *, ranks: int, devices: Path = Path("/dev")
) -> dict[str, str]:
    """Return the environment variables that give a server its GPUs.

    The trainer ranks have the first GPUs; the servers share the others.

    Args:
        index: Number of the server, from 0.
        count: Number of servers.
        ranks: Number of trainer ranks on this host.
        devices: Folder of the device files.

    Returns:
        {} if no GPU is left for servers.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        gpus = visible.split(",")
    else:
        num_devices = len([*devices.glob("nvidia[0-9]*")])
        gpus = [str(number) for number in range(num_devices)]
    shared_gpus = gpus[ranks:]
    per_server = max(1, len(shared_gpus) // count)
    begin = index * per_server
    server_gpus = shared_gpus[begin : begin + per_server]
    if not server_gpus:  # more servers than GPUs
        server_gpus = shared_gpus[-per_server:]
    return {"CUDA_VISIBLE_DEVICES": ",".join(server_gpus)} if server_gpus else {}


def server_overrides(config: ExperimentConfig) -> list[str]:
    """Return the overrides with which serve-llm serves this experiment."""
    overrides: dict[str, object] = {
        "experiment_name": config.experiment_name,
        "trial_name": config.trial_name,
        "seed": config.seed,
        "model.path": config.model.path,
        "model.dtype": config.model.dtype,
        "llm_server.host": config.cluster.bound,
    }
    for option in fields(config.cluster):
        overrides[f"cluster.{option.name}"] = getattr(config.cluster, option.name)
    hooks: list[ServerOverrides] = entries.hooks("server_options")
    for server_options in hooks:
        overrides |= server_options(config)
    arguments = [f"{option}={json.dumps(setting)}" for option, setting in overrides.items()]
    return [*arguments, *config.launcher.server_args]


class RoleStarter(Protocol):
    """Starts the roles of one supervisor."""

    async def start_role(
        self, name: str, words: Sequence[str], *, log: Path | None, env: Mapping[str, str]
    ) -> Child:
        """Start a role, as `processes.spawn` does.

        Args:
            name: Name of the role, as in "rollout-1".
            words: Command line.
            log: See `processes.spawn`.
            env: Variables of the role in addition to those of this process.
        """
        ...

    def close(self) -> None:
        """End what starts roles; the roles continue."""
        ...


class RoleStarters(Protocol):
    """Makes the starters of supervisors."""

    def begin(self) -> None:
        """Begin a command that starts roles.

        A command calls it before it has a thread or has imported a module of the user.
        """
        ...

    def early(self, config: ExperimentConfig) -> AbstractContextManager[object]:
        """Return a context for the checks of a run and its launcher."""
        ...

    def of_run(self, config: ExperimentConfig, *, has_torch: bool) -> RoleStarter:
        """Return the starter of a run's supervisor.

        Args:
            config: The experiment.
            has_torch: Whether a role needs torch.
        """
        ...

    def of_server(self, config: ServerConfig) -> RoleStarter:
        """Return the starter of a server's supervisor."""
        ...

    def freeze(self) -> None:
        """Keep all objects of this role out of garbage collections, once it is set up."""
        ...


class NewProcesses:
    """Starts each role as a new process, which imports its modules itself."""

    async def start_role(
        self, name: str, words: Sequence[str], *, log: Path | None, env: Mapping[str, str]
    ) -> Child:
        return await spawn(name, words, log=log, environment=env)

    def close(self) -> None:
        return


class NewProcessStarters:
    """Prepares nothing."""

    def begin(self) -> None:
        return

    def early(self, config: ExperimentConfig) -> AbstractContextManager[object]:
        return nullcontext()

    def of_run(self, config: ExperimentConfig, *, has_torch: bool) -> RoleStarter:
        return NewProcesses()

    def of_server(self, config: ServerConfig) -> RoleStarter:
        return NewProcesses()

    def freeze(self) -> None:
        gc.freeze()


def starters() -> RoleStarters:
    """Return the last entry of the group `role_starter`; without one, that of new processes."""
    all_starters: list[RoleStarters] = [NewProcessStarters(), *entries.hooks("role_starter")]
    return all_starters[-1]
