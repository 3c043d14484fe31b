"""Role `session_rank`: a rank other than 0, which repeats the engine calls of a session's process.

Its stdin is a socket, over which the session sends the port where the ranks meet, then calls, as
pickles of (method of EngineRank, arguments). The answer is the method's result or a FailedCall.
"""

import pickle
import sys
from contextlib import closing
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
"""The session's answer to a failure: it does not wait for this rank."""
CONTINUE_S = 30.0
"""Longest wait for CONTINUE. Without it, another rank waits for this one in a collective: the
process ends, which ends the wait."""

logger = log.get(__name__)


class FailedCall(NamedTuple):
    """A call has failed on this rank."""

    message: str
    is_user_error: bool


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
            serve(connection, engine_rank)


def serve(connection: Connection, engine_rank: EngineRank) -> None:
    """Run the calls of the session."""
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        answer = _answer(engine_rank, message)
        connection.send(answer)
        if isinstance(answer, FailedCall):
            if not connection.poll(CONTINUE_S):
                raise RoleError(answer.message)
            connection.recv()
            connection.send(READY)


def _answer(engine_rank: EngineRank, message: bytes) -> object:
    """Run a call; return its result or its failure."""
    try:
        method, args = pickle.loads(message)
        return method(engine_rank, *args)
    except UserError as error:
        return FailedCall(message=str(error), is_user_error=True)
    except Exception as error:
        logger.exception("a call has failed")
        return FailedCall(message=f"{type(error).__name__}: {error}", is_user_error=False)
