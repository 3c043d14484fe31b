"""Runs under torchrun: torchrun starts the ranks, and a sidecar of rank 0 starts the other roles.

Rank 0 has no event loop while it trains. The sidecar is killed with rank 0, so a restart by
torchrun starts a new sidecar.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

from arealite.api.config import ExperimentConfig, run_paths
from arealite.base.errors import RoleError
from arealite.impl.launcher.local import LocalLauncher
from arealite.impl.launcher.processes import PARENT, how_ended

OF_RANKS = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_RANK", "RANK", "WORLD_SIZE")
"""Prefixes of torchrun's variables; a server with ranks of its own must not read them."""


class Sidecar(LocalLauncher):
    """Supervises datapipe, workers and servers beside ranks that torchrun started.

    The end of the standard input of this process means that training is over.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        super().__init__(config)
        self.roles.remove(self.trainer)
        self.local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])

    async def _supervise_all(self) -> int:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._end_of_training)
        return await super()._supervise_all()

    def _end_of_training(self) -> None:
        """Allow the other roles to exit: the trainer has sent its last message to the datapipe."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        self.trainer.ended = True
        self.over.set()
        self._terminate("llm_server")


@contextmanager
def sidecar(config: ExperimentConfig) -> Generator[None]:
    """Run the sidecar during the body, and wait until it exits.

    Raises:
        RoleError: a role failed, or the ledger is out of balance.
    """
    root = str(run_paths(config).root)
    command = [sys.executable, "-m", "arealite.cli.main", "role", "sidecar", "0", root]
    own = {name: value for name, value in os.environ.items() if not name.startswith(OF_RANKS)}
    # A separate session: after Ctrl-C, the trainer finishes its step, which needs the datapipe.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=own | {PARENT: str(os.getpid())}, start_new_session=True
    ) as process:
        try:
            yield
        except BaseException:
            process.send_signal(signal.SIGKILL)  # its children are killed with it
            raise
        process.communicate()
    if process.returncode:
        ended = how_ended(process.returncode)
        raise RoleError(f"the sidecar of the trainer failed ({ended}): see {root}/logs")
