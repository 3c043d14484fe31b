"""Role `session_rank`: a rank other than 0, which runs each engine call together with rank 0.

Its stdin is a socket, over which the session sends the port of the rendezvous, then calls, as
pickles of (method of EngineRank, arguments, keyword arguments). The answer is the result of the
method, or a FailedCall.
"""

import pickle
import sys
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from arealite.api.experiment_config import ExperimentConfig
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.ext.session.engine_rank import EngineRank
from arealite.impl.trainer.rank_group import World

READY = "ready"
"""Sent at the start, and after CONTINUE."""
CONTINUE = "continue"
"""Sent by rank 0 if all ranks have failed."""
CONTINUE_S = 30.0
"""Longest wait for CONTINUE. If it does not arrive, this rank has failed alone, and rank 0 may be
in a collective: this process exits, so that the collective fails."""

logger = log.get(__name__)


class FailedCall(NamedTuple):
    """A call has failed on this rank."""

    message: str
    is_user_error: bool = False
    is_silent: bool = False
    """Whether it did not answer after a failure of rank 0, and was killed."""

    def error(self) -> Exception:
        """Return the exception for the session."""
        return UserError(self.message) if self.is_user_error else RoleError(self.message)


def run(config: ExperimentConfig, rank: int) -> None:
    """Run a rank until the session closes its socket.

    Raises:
        RoleError: A call has failed on this rank only.
    """
    world = World(rank=rank, size=config.launcher.trainer_ranks)
    with Connection(sys.stdin.fileno()) as connection:
        connection.send(READY)
        address = ("127.0.0.1", connection.recv())
        with closing(EngineRank(config, world, address)) as engine_rank:
            serve(connection, engine_rank, rank)


def serve(connection: Connection, engine_rank: EngineRank, rank: int) -> None:
    """Run the calls of the session until it closes its socket.

    Raises:
        RoleError: A call has failed on this rank only.
    """
    with suppress(EOFError):
        while True:
            answer = _answer(engine_rank, connection.recv_bytes(), rank)
            connection.send(answer)
            if isinstance(answer, FailedCall):
                if not connection.poll(CONTINUE_S):
                    raise RoleError(answer.message)
                connection.recv()
                connection.send(READY)


def _answer(engine_rank: EngineRank, message: bytes, rank: int) -> object:
    """Run a call; return its result or its failure."""
    try:
        method, args, options = pickle.loads(message)
        return method(engine_rank, *args, **options)
    except UserError as error:
        return FailedCall(message=f"rank {rank}: {error}", is_user_error=True)
    except Exception as error:
        logger.exception("a call has failed")
        return FailedCall(message=f"rank {rank}: {type(error).__name__}: {error}")
