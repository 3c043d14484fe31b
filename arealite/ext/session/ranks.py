"""All ranks of a session's trainer: rank 0 is this process, and the others are its children.

A call runs a method of EngineRank on all ranks at once. Each child has a socket to this process.
"""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from arealite.api.collector_config import AgentConfig
from arealite.api.engine import Sequence
from arealite.api.env import EnvConfig
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base import config_tree, exit_record
from arealite.base.errors import RoleError, UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.session.call_loss import Loss
from arealite.ext.session.child_rank import CONTINUE, READY, FailedCall
from arealite.ext.session.engine_rank import EngineRank
from arealite.impl.launcher.processes import PARENT, TERMINATE_GRACE_S, how_ended
from arealite.impl.trainer.rank_group import World
from arealite.system.health.waits import Wait

P = ParamSpec("P")
T = TypeVar("T")
ROLE = "session_rank"
START_S = 300.0
"""Longest wait for a child to import torch."""
ANSWER_S = 30.0
"""Longest wait for a child after this rank has failed."""
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Ranks fail so at different places, after different numbers of collectives."""


class SessionRanks:
    """The ranks, of which the children run until `close`."""

    def __init__(self, config: ExperimentConfig) -> None:
        """Start the children.

        Raises:
            RoleError: One has ended.
        """
        size = config.launcher.trainer_ranks
        listener = socket.create_server(("127.0.0.1", 0)) if size > 1 else None
        self.local = EngineRank(config, World(rank=0, size=size), listener)
        """The rank of this process."""
        self._children = list[_Child]()
        self._starter = ThreadPoolExecutor(1, "session ranks")
        """Starts the children. The kernel would kill them when this thread ends."""
        if listener is not None:
            self._start_children(config, listener)

    def _start_children(self, config: ExperimentConfig, listener: socket.socket) -> None:
        logs = run_paths(config).logs
        files = RunPaths(logs / "session_ranks")
        files.root.mkdir(parents=True, exist_ok=True)
        config_tree.write(_without_episodes(config), files.resolved)
        try:
            for rank in range(1, config.launcher.trainer_ranks):
                starting = self._starter.submit(_Child, rank, files.root, logs)
                self._children.append(starting.result())
            for child in self._children:
                answer = child.answer("its start", START_S)
                if answer != READY:
                    raise RoleError(answer.message)
                child.send(pickle.dumps(listener.getsockname()[1]))
        except BaseException:
            listener.close()
            self.close()
            raise

    @property
    def is_lost(self) -> bool:
        """Whether a child has ended."""
        return any(child.has_ended for child in self._children)

    def call(
        self,
        method: Callable[Concatenate[EngineRank, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Run a method with the same arguments on all ranks; return the result of this rank.

        Raises:
            Exception: All ranks have failed, and can be called again.
            RoleError: Some ranks have failed or ended, now or earlier. The children end.
        """
        return self._run(method, [args] * (len(self._children) + 1), options)[0]

    def call_with_rows(
        self,
        method: Callable[Concatenate[EngineRank, list[Sequence], P], T],
        rows: list[Sequence],
        *args: P.args,
        **options: P.kwargs,
    ) -> list[T]:
        """Run a method on all ranks, with a part of the rows each; return the results in order.

        Raises:
            UserError: A row has an impossible temperature or length.
            Exception: See `call`.
        """
        check_rows(rows)
        parts = split_by_tokens([_plain(row) for row in rows], len(self._children) + 1)
        return self._run(method, [(part, *args) for part in parts], options)

    def _run(
        self,
        method: Callable[..., T],
        args_of_rank: Seq[tuple[Any, ...]],
        options: Mapping[str, Any],
    ) -> list[T]:
        for child in self._children:
            child.check()
        messages = [pickle.dumps((method, args, options)) for args in args_of_rank[1:]]
        for child, message in zip(self._children, messages, strict=True):
            child.send(message)
        results = list[T]()
        own_error: Exception | None = None
        try:
            results.append(method(self.local, *args_of_rank[0], **options))
        except Exception as error:  # noqa: BLE001  (raised below)
            own_error = error
        timeout_s = ANSWER_S if own_error else None
        answers = [child.answer(method.__qualname__, timeout_s) for child in self._children]
        failures = [answer for answer in answers if isinstance(answer, FailedCall)]
        if own_error is None and not failures:
            return [*results, *answers]
        have_all_failed = own_error is not None and len(failures) == len(answers)
        may_continue = have_all_failed and not isinstance(own_error, OUT_OF_MEMORY)
        if may_continue and all(child.resume() for child in self._children):
            assert own_error is not None
            raise own_error
        # Some ranks may have changed their shards, and others not.
        for child in self._children:
            child.end("another rank has failed")
        causes = [failure.error() for failure in failures if not failure.is_silent]
        if causes:
            raise causes[0] from own_error
        assert own_error is not None
        raise own_error

    def close(self) -> None:
        """Destroy the process group, and end the other ranks."""
        for child in self._children:
            child.disconnect()
        self.local.close()  # the children do the same meanwhile
        for child in self._children:
            child.end()
        self._starter.shutdown()


class _Child:
    """The process of another rank."""

    def __init__(self, rank: int, folder: Path, logs: Path) -> None:
        """Start the process.

        Args:
            rank: Its rank.
            folder: Has the resolved config.
            logs: Gets the log.
        """
        self._end_reason = ""
        """Why the process cannot be used any longer; "": it runs."""
        self._name = f"{ROLE}-{rank}"
        self._log = logs / f"{self._name}.log"
        self._record = exit_record.new_file(self._log)
        self._connection, connection_of_child = Pipe()
        command = [sys.executable, "-m", "arealite.cli.main", "role", ROLE, str(rank), str(folder)]
        variables = {
            PARENT: str(os.getpid()),
            exit_record.VARIABLE: str(self._record),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with connection_of_child, self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=os.environ | variables,
                stdin=connection_of_child.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return bool(self._end_reason) or self._process.poll() is not None

    def check(self) -> None:
        """Raise RoleError if the process has ended."""
        if self.has_ended:
            self.end()
            raise RoleError(f"{self._end_reason} Start the session again.")

    def send(self, message: bytes) -> None:
        """Send a message; a process that has ended gets none."""
        with suppress(OSError):
            self._connection.send_bytes(message)

    def answer(self, call: str, timeout_s: float | None) -> Any:
        """Return the result of a call, or its failure.

        Args:
            call: Its name.
            timeout_s: A process that does not answer in this time is killed.
        """
        waits = Wait(event=call, owner="trainer rank 0", on=self._name, seconds=timeout_s)
        is_silent = False
        try:
            with waits:
                is_silent = not self._connection.poll(timeout_s)
                if not is_silent:
                    return self._connection.recv()
            self.end(f"did not answer within {timeout_s:g} s")
        except (EOFError, OSError):
            self.end()
        return FailedCall(message=self._end_reason, is_silent=is_silent)

    def resume(self) -> bool:
        """Let the process continue after its failure; return whether it does."""
        try:
            self._connection.send(CONTINUE)
            return self._connection.recv() == READY
        except (EOFError, OSError):
            return False

    def disconnect(self) -> None:
        """Close the socket, after which the process exits."""
        self._connection.close()

    def end(self, reason: str = "") -> None:
        """Disconnect from the process, and kill it if it does not exit soon.

        Args:
            reason: Why; "": it has ended by itself.
        """
        if self._end_reason:
            return
        self.disconnect()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TERMINATE_GRACE_S)
        self._process.kill()
        code = self._process.wait()
        record = exit_record.read(self._record) if self._record else None
        own_reason = record.reason if record else how_ended(code)
        self._end_reason = f"{self._name} has ended ({reason or own_reason}); see {self._log}."


def _without_episodes(config: ExperimentConfig) -> ExperimentConfig:
    """Return options without environments and agents, which a notebook may have defined."""
    ppo = config.trainer.ppo
    collector = replace(ppo.collector, env=EnvConfig(), envs={}, agent=AgentConfig(), seats={})
    trainer = replace(config.trainer, ppo=replace(ppo, collector=collector))
    return replace(config, trainer=trainer)


def split_by_tokens(rows: list[Sequence], count: int) -> list[list[Sequence]]:
    """Split rows into parts with about equal numbers of tokens, in their order.

    Neighbours, which may have one prompt, stay together. A part may be empty.
    """
    total = sum(len(row.tokens) for row in rows)
    parts: list[list[Sequence]] = [[] for _ in range(count)]
    tokens_before = 0
    for row in rows:
        middle = tokens_before + len(row.tokens) / 2
        parts[int(middle * count / total)].append(row)
        tokens_before += len(row.tokens)
    return parts


def _plain(row: Sequence) -> Sequence:
    """Return a row without its sample."""
    return Sequence(**{item.name: getattr(row, item.name) for item in fields(Sequence)})


def check_rows(rows: Seq[Sequence]) -> None:
    """Check what an engine would refuse on the rank of the row only.

    Raises:
        UserError: A temperature is 0, or an array has another length than the row.
    """
    for index, row in enumerate(rows):
        if row.temperature <= 0:
            raise UserError(
                f"row {index} has the temperature {row.temperature:g}. "
                "Sample tokens that are trained on with a temperature above 0."
            )
        for name, values in {"loss_mask": row.loss_mask, **row.fields}.items():
            if len(values) != len(row.tokens):
                raise UserError(
                    f"row {index} has {len(row.tokens)} tokens, and {len(values)} values of "
                    f"{name!r}. Pass one for each token."
                )


def check_sendable(loss: Loss, config: ExperimentConfig) -> None:
    """Check that the children can import a loss of the user.

    Raises:
        UserError: They cannot.
    """
    if config.launcher.trainer_ranks == 1 or loss.own_function is None:
        return
    advice = (
        "With several ranks, define it at the top level of a module, which the ranks import; "
        "or start the session with ranks=1."
    )
    try:
        is_of_script = b"__main__" in pickle.dumps(loss)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"loss {loss.function_name}: {error}. {advice}") from error
    if is_of_script:
        raise UserError(f"loss {loss.function_name}: it is in the script itself. {advice}")
