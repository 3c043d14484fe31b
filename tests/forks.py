"""Start the commands of tests by forking a process that has already imported AReaLite.

`install` makes every `subprocess.Popen` of this process, also that of asyncio, start commands of
AReaLite from a warm parent (arealite/ext/warm_start/parent.py), one for each process of pytest.
A start then costs milliseconds instead of ten CPU seconds of imports. The child is a child of this
process, with its own session, environment, files and command line, as after exec.

A command is started by exec as before if it is no command of AReaLite, if an environment variable
that libraries may read at import differs from this process, or if a stream is a terminal. FORKS=0
starts all by exec.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arealite.ext.warm_start import parent, starts

ROOT = Path(__file__).resolve().parents[1]
SESSION_SCRIPT = ROOT / "tests/ext/session/sampling_script.py"
SCRIPTS = [
    ROOT / "train.py",
    ROOT / "arealite/launch_llm_server.py",
    *ROOT.glob("examples/*.py"),
    SESSION_SCRIPT,
]
COMMANDS = {str(script) for script in SCRIPTS}
MODULES = ("arealite.cli.main", "arealite")
IMPORTS = (
    "arealite.cli.train",
    "arealite.cli.preflight",
    "arealite.cli.role",
    "arealite.cli.serve_llm",
    "arealite.ext.warm_start.modules",
    "arealite.impl.launcher.local",
    "arealite.ext.audit.audit",
    "arealite.ext.view.live_page",
    "arealite.system.datapipe.datapipe",
    "arealite.impl.rollout.worker",
    "arealite.ext.embedded.embedded_server",
    "arealite.impl.trainer.ppo",
    "arealite.ext.offline.supervised",
    "arealite.impl.engine.fsdp",
    "arealite.impl.publisher.servers",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "torch.utils.tensorboard",
    "tests.forked",
)
FIXED = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables of every test process; tests.e2e.conftest.ENVIRONMENT sets them, too."""
NOT_READ = {
    *("PWD", "OLDPWD", "_", "PYTHONPATH", "PYTHON_COLORS", "NO_PROXY", "no_proxy", "HOME"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHINDUCTOR_CACHE_DIR"),
}
"""Variables that may differ from those of this process, because no library reads them at import.
Commands that a test calls in its process set some of them. tests.forked applies PYTHONPATH."""
UMASK, PREEXEC_FUNCTION = 20, 21
"""Positions of two arguments of `_posixsubprocess.fork_exec`."""
_exec: Any = getattr(subprocess, "_fork_exec", None)
_installed: list[Forker] = []
"""The forker of this process, if commands are forks."""


class Forker:
    """The warm parent of this process; that of pytest starts with the first command."""

    def __init__(self, environment: Mapping[str, str], control: socket.socket | None = None):
        """Start nothing yet.

        Args:
            environment: Of the commands.
            control: Connection to a warm parent that this process has forked.
        """
        self.environment = comparable(environment)
        self.control = control
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def can_fork(
        self, words: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
    ) -> bool:
        """Return whether a command may start from the warm parent."""
        if len(words) < 2 or words[0] != sys.executable:
            return False
        is_module = words[1] == "-m" and words[2] in MODULES
        if not (is_module or words[1] in COMMANDS):
            return False
        is_terminal = any(os.isatty(stream) for stream in streams)
        return not is_terminal and comparable(environment) == self.environment

    def fork(
        self, words: list[str], environment: dict[str, str], folder: str, streams: list[int]
    ) -> int | None:
        """Start a command; return its process id, or None if the warm parent cannot fork."""
        with self.lock:
            if self.control is None:
                self.control = self._start()
            line, theirs = socket.socketpair()
            with line, starts.subreaper():
                body = json.dumps({"words": words, "environment": environment}).encode()
                directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
                header = parent.HEADER.pack(len(body))
                try:
                    with theirs:
                        descriptors = [theirs.fileno(), directory, *streams]
                        socket.send_fds(self.control, [header], descriptors)
                    self.control.sendall(body)
                    answer = self.control.recv(1)
                except OSError:
                    answer = b""
                os.close(directory)
                if not answer:  # the warm parent has exited; the next command starts another
                    self.close()
                if answer != parent.FORKED:
                    return None
                received = b""
                while received.count(b"\n") < 2:
                    if not (data := line.recv(64)):
                        raise OSError("the forked command ended before it began")
                    received += data
                line.sendall(parent.GO)
                return int(received.split()[1])

    def begin(self) -> None:
        """Start the warm parent, unless it runs."""
        with self.lock:
            if self.control is None:
                self.control = self._start()

    def _start(self) -> socket.socket:
        """Return the connection to a new warm parent that has imported everything."""
        self.process, control = starts.start_process([IMPORTS], FIXED)
        control.recv(1)  # the answer IMPORTED; before it, a fork would lack imports
        return control

    def close(self) -> None:
        """Kill the warm parent; its forks have exited with their tests."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.control is not None:
            self.control.close()
        self.process = self.control = None


def comparable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries may read at import."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("AREALITE_", "PYTEST_")) and name not in NOT_READ
    }


def install() -> None:
    """Start commands of AReaLite from a warm parent from now on."""
    if os.environ.get("FORKS") == "0" or _exec is None or not starts.is_possible():
        return
    forker = Forker(os.environ | FIXED)
    _installed.append(forker)
    atexit.register(forker.close)
    replace_exec(forker)


def begin() -> None:
    """Start the warm parent now: a test that kills its new child processes must not kill it."""
    for forker in _installed:
        forker.begin()


def fork_here() -> None:
    """Fork a warm parent from this fork, for the commands that its command starts.

    Raises:
        Forked: This process is a command that the new warm parent forked.
    """
    control, parent_end = socket.socketpair()
    parent.fork_warm_parent(parent_end, control)
    parent_end.close()
    forker = Forker(os.environ, control)
    replace_exec(forker)
    replace_create_subprocess_exec(forker)


def replace_exec(forker: Forker) -> None:
    """Let every `subprocess.Popen` of this process ask `forker` first."""

    def fork_exec(*arguments: Any) -> int:
        """Start a process, with the arguments of `_posixsubprocess.fork_exec`."""
        words, programs, _, inherited, folder, variables, *files = arguments[:12]
        reads_stdin, _, _, writes_stdout, _, writes_stderr = files
        has_options = arguments[UMASK] >= 0 or arguments[PREEXEC_FUNCTION] is not None
        streams = [
            number if descriptor == -1 else descriptor
            for number, descriptor in enumerate((reads_stdin, writes_stdout, writes_stderr))
        ]
        pairs = os.environb.items() if variables is None else (v.split(b"=", 1) for v in variables)
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
        texts = [os.fsdecode(word) for word in words]
        is_same_program = len(programs) == 1 and os.fsdecode(programs[0]) == texts[0]
        is_plain = is_same_program and len(inherited) == 1 and not has_options
        if is_plain and forker.can_fork(texts, environment, streams):
            working_directory = os.fsdecode(folder) if folder is not None else "."
            pid = forker.fork(texts, environment, working_directory, streams)
            if pid is not None:
                return pid
        return _exec(*arguments)

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def replace_create_subprocess_exec(forker: Forker) -> None:
    """Let asyncio ask `forker` first, because uvloop starts processes without `subprocess`."""
    create = asyncio.create_subprocess_exec

    async def create_subprocess_exec(*words: str, **options: Any) -> Any:
        """Start a process, with the arguments of `asyncio.create_subprocess_exec`."""
        log = options.get("stdout")
        has_log = isinstance(log, io.IOBase) and options.get("stderr") is log
        has_input = options.get("stdin") != asyncio.subprocess.DEVNULL
        if has_input or not has_log or options.get("pass_fds"):
            return await create(*words, **options)
        pid = None
        environment = options.get("env") or os.environ
        null = os.open(os.devnull, os.O_RDONLY)
        streams = [null, log.fileno(), log.fileno()]
        if forker.can_fork(words, environment, streams):
            pid = forker.fork([*words], {**environment}, ".", streams)
        os.close(null)
        if pid is None:
            return await create(*words, **options)
        return starts.ForkedRole(pid)

    asyncio.create_subprocess_exec = create_subprocess_exec  # type: ignore[assignment]
