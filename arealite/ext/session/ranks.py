"""All ranks of a session's trainer: rank 0 is this process, and the others are its children.

A call runs a method of EngineRank on all ranks at once. Each child has a socket to this process.
"""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from arealite.api.engine import Sequence
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base import config_tree, exit_record
from arealite.base.errors import RoleError, UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.session.call_loss import Loss
from arealite.ext.session.child_rank import CONTINUE, FailedCall
from arealite.ext.session.engine_rank import EngineRank
from arealite.impl.launcher.processes import PARENT, TERMINATE_GRACE_S, how_ended
from arealite.impl.trainer.rank_group import World

P = ParamSpec("P")
T = TypeVar("T")
ROLE = "session_rank"
START_S = 300.0
"""Longest wait for a child to import torch."""
ANSWER_S = 30.0
"""Longest wait for a child after this rank has failed."""


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
        if listener is not None:
            self._start_children(config, listener)

    def _start_children(self, config: ExperimentConfig, listener: socket.socket) -> None:
        logs = run_paths(config).logs
        files = RunPaths(logs / "session_ranks")
        files.root.mkdir(exist_ok=True)
        config_tree.write(config, files.resolved)
        try:
            for rank in range(1, config.launcher.trainer_ranks):
                self._children.append(_Child(rank, files.root, logs))
            for child in self._children:
                child.receive(START_S)
                child.send(listener.getsockname()[1])
        except BaseException as error:
            listener.close()
            self.close()
            if isinstance(error, TimeoutError):
                raise RoleError(f"a rank has not started within {START_S:g} s.") from error
            raise

    @property
    def is_lost(self) -> bool:
        """Whether a child has ended."""
        return any(child.end_reason for child in self._children)

    def call(
        self,
        method: Callable[Concatenate[EngineRank, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Run a method with the same arguments on all ranks; return the result of this rank.

        Raises:
            RoleError: A child has ended, now or earlier, or has failed.
        """
        assert not options, "pass all arguments by position"
        return self._run(method, [args] * (len(self._children) + 1))[0]

    def call_with_rows(
        self,
        method: Callable[Concatenate[EngineRank, list[Sequence], P], T],
        rows: list[Sequence],
        *args: P.args,
        **options: P.kwargs,
    ) -> list[T]:
        """Run a method on all ranks, with a part of the rows each; return the results in order.

        Raises:
            RoleError: See `call`.
        """
        assert not options, "pass all arguments by position"
        parts = divided(rows, len(self._children) + 1)
        return self._run(method, [(part, *args) for part in parts])

    def _run(self, method: Callable[..., T], args_of_rank: Seq[tuple[Any, ...]]) -> list[T]:
        for child in self._children:
            child.check()
        for child, args in zip(self._children, args_of_rank[1:], strict=True):
            child.send((method, args))
        try:
            results = [method(self.local, *args_of_rank[0])]
        except Exception as error:
            self._end_failed_call(error)
            raise
        # Each child answers, also if another one has failed.
        answers = [child.receive() for child in self._children]
        for child, answer in zip(self._children, answers, strict=True):
            if isinstance(answer, FailedCall):
                raise child.error_of(answer)
            results.append(answer)
        return results

    def _end_failed_call(self, error: Exception) -> None:
        """Wait for the children after a failure of this rank.

        A child that does not fail, too, waits for this rank in a collective: it is killed.

        Raises:
            Exception: A child has failed alone or has ended, which has made this rank fail.
        """
        causes = list[Exception]()
        for child in self._children:
            try:
                answer = child.receive(ANSWER_S)
            except TimeoutError:
                child.end(f"it waited for rank 0, which has failed: {error}")
            except RoleError as ended:
                causes.append(ended)
            else:
                if child.end_reason:
                    causes.append(child.error_of(answer))
        if causes:
            raise causes[0] from error

    def close(self) -> None:
        """Destroy the process group, and end the other ranks."""
        for child in self._children:
            child.hang_up()
        self.local.close()  # the children do the same meanwhile
        for child in self._children:
            child.end()


class _Child:
    """The process of another rank."""

    def __init__(self, rank: int, folder: Path, logs: Path) -> None:
        """Start the process.

        Args:
            rank: Its rank.
            folder: Has the resolved config.
            logs: Gets the log.
        """
        self.end_reason = ""
        """Why the process cannot be used any longer; "": it runs."""
        self._rank = rank
        self._log = logs / f"{ROLE}-{rank}.log"
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

    def check(self) -> None:
        """Raise RoleError if the process has ended."""
        if not self.end_reason and self._process.poll() is not None:
            self.end()
        if self.end_reason:
            raise RoleError(f"{self.end_reason} Start the session again.")

    def send(self, message: object) -> None:
        """Send a message; a process that has ended gets none."""
        with suppress(OSError):
            self._connection.send(message)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message.

        After a FailedCall, `end_reason` tells whether the process continues.

        Raises:
            RoleError: The process has ended.
            TimeoutError: It has sent nothing in time.
        """
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        answer = None
        try:
            answer = self._connection.recv()
            if isinstance(answer, FailedCall):
                self._connection.send(CONTINUE)
                self._connection.recv()  # READY
        except (EOFError, OSError):
            self.end()
        if answer is None and self.end_reason:
            raise RoleError(self.end_reason)
        return answer

    def error_of(self, failure: FailedCall) -> Exception:
        """Return the error of this process."""
        kind = UserError if failure.is_user_error else RoleError
        return kind(f"rank {self._rank}: {failure.message}")

    def hang_up(self) -> None:
        """Close the socket, after which the process exits."""
        self._connection.close()

    def end(self, reason: str = "") -> None:
        """Let the process exit, or kill it; note the reason, or else how it ended."""
        if self.end_reason:
            return
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TERMINATE_GRACE_S)
        self._process.kill()
        how = how_ended(self._process.wait())
        record = exit_record.read(self._record) if self._record else None
        reason = reason or (record.reason if record else how)
        self.end_reason = f"rank {self._rank} of the trainer has ended ({reason}); see {self._log}."


def divided(rows: list[Sequence], count: int) -> list[list[Sequence]]:
    """Divide rows into parts with about equal numbers of tokens, in their order.

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
    if getattr(loss.own_function, "__module__", "") == "__main__":
        raise UserError(f"loss {loss.function_name}: it is in the script itself. {advice}")
    try:
        pickle.dumps(loss)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"loss {loss.function_name}: {error}. {advice}") from error
