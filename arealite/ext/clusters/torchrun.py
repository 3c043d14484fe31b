"""Runs whose ranks torchrun or a PyTorchJob starts; a sidecar of rank 0 starts the other roles.

Rank 0 has no event loop while it trains. The sidecar is killed with rank 0, so a restart of rank 0
starts a new sidecar.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base.errors import RoleError, UserError
from arealite.cli import role
from arealite.cli.train import prepared
from arealite.impl.launcher.local import LocalLauncher
from arealite.impl.launcher.processes import PARENT, how_ended, own_address

OF_RANKS = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_RANK", "RANK", "WORLD_SIZE")
"""Prefixes of torchrun's variables; a server with ranks of its own must not read them."""
NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a rank needs besides RANK."""
HINT = "Set RANK and the others as torchrun and a PyTorchJob do; or, for a run here, unset RANK."


def run_rank(config: ExperimentConfig) -> int:
    """Run the trainer rank that the environment names; rank 0 also starts the run's other roles."""
    from arealite.cli.preflight import check_options

    rank, ranks = read_rank(os.environ)
    config = replace(config, launcher=replace(config.launcher, trainer_ranks=ranks))
    check_options(config)
    if rank:
        check_host(config)
    with store_of_ranks(config, rank):
        if rank:  # before the rendezvous of the ranks, rank 0 has handled `resume`
            return role.run("trainer", rank, replace(config, resume="auto"))
        with prepared(config) as config, sidecar(config):
            return role.run("trainer", rank, config)


@contextmanager
def store_of_ranks(config: ExperimentConfig, rank: int) -> Generator[None]:
    """Serve the store in which several ranks meet, unless the agent of torchrun serves it."""
    ranks = config.launcher.trainer_ranks
    if ranks == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return
    from arealite.impl.trainer import rank_group

    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    print(
        f"rank {rank} of {ranks} waits up to {rank_group.RENDEZVOUS_S:g} s for the other ranks, "
        f"at {address}",
        flush=True,
    )
    store = serve_store(config.cluster.bound) if rank == 0 else None
    os.environ[rank_group.SHARED_STORE] = "True"
    yield
    del store


def serve_store(host: str) -> object:
    """Serve the store of the ranks at MASTER_PORT, as torchrun's agent does.

    Args:
        host: Address on which this process, rank 0, listens.

    Returns:
        The store. It is served as long as this object exists.

    Raises:
        UserError: Rank 0 cannot listen at MASTER_PORT.
    """
    from torch._C._distributed_c10d import TCPStore

    port = int(os.environ["MASTER_PORT"])
    try:
        listener = socket.create_server((host, port)).detach()
    except OSError as error:
        raise UserError(
            f"MASTER_PORT={port}: rank 0 cannot listen on it: {error.strerror}. "
            "Use a free port, the same for all ranks."
        ) from error
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    return TCPStore(
        host,
        port,
        world_size=None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def read_rank(variables: Mapping[str, str]) -> tuple[int, int]:
    """Return (rank of this process, number of ranks) from environment variables with RANK.

    Raises:
        UserError: A variable is missing, or its value is wrong.
    """
    missing = [name for name in NEEDED if not variables.get(name)]
    if missing:
        raise UserError(f"RANK={variables['RANK']} is set, but {', '.join(missing)} not. {HINT}")
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not re.fullmatch(r"[0-9]+", variables[name]):
            raise UserError(f"{name}={variables[name]} must be a whole number. {HINT}")
    rank = int(variables["RANK"])
    world_size = int(variables["WORLD_SIZE"])
    if rank >= world_size:
        raise UserError(f"RANK={rank} must be below WORLD_SIZE={world_size}. {HINT}")
    if not 0 < int(variables["MASTER_PORT"]) < 1 << 16:
        raise UserError(f"MASTER_PORT={variables['MASTER_PORT']} must be 1 to 65535. {HINT}")
    ranks_per_pod = variables.get("PET_NPROC_PER_NODE", "1")
    is_one_per_pod = ranks_per_pod in ("1", "auto")
    if not is_one_per_pod and "TORCHELASTIC_RUN_ID" not in variables:
        raise UserError(
            f"PET_NPROC_PER_NODE={ranks_per_pod}: this command runs one rank per pod. "
            "Start `torchrun train.py …` in the pods."
        )
    return rank, world_size


def check_host(config: ExperimentConfig) -> None:
    """Check that a rank of another host than rank 0 can reach the datapipe, which is there.

    Raises:
        UserError: The datapipe listens on loopback.
    """
    master = os.environ["MASTER_ADDR"]
    resolved = ""
    with suppress(OSError):
        resolved = socket.gethostbyname(master)
    is_here = resolved.startswith("127.") or resolved == own_address()
    if not is_here and config.cluster.bound == "127.0.0.1":
        raise UserError(
            f"MASTER_ADDR={master} is another host, "
            f"but cluster.host={config.cluster.host} is reachable from one host only. "
            "Set cluster.host=auto."
        )


def run_sidecar(config: ExperimentConfig, index: int) -> None:
    """Supervise the other roles of a run under torchrun (role `sidecar`)."""
    sys.exit(Sidecar(config).run())


class Sidecar(LocalLauncher):
    """Supervises datapipe, workers and servers beside ranks that torchrun started.

    The end of the standard input of this process means that training is over.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        super().__init__(config)
        self.roles.remove(self.trainer)
        self.local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

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
    environment = {
        name: setting for name, setting in os.environ.items() if not name.startswith(OF_RANKS)
    }
    environment[PARENT] = str(os.getpid())
    # A separate session: after Ctrl-C, the trainer finishes its step, which needs the datapipe.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            yield
        except BaseException:
            process.send_signal(signal.SIGKILL)  # its children are killed with it
            raise
        process.communicate()
    if process.returncode:
        exit_report = how_ended(process.returncode)
        raise RoleError(f"the sidecar of the trainer failed ({exit_report}): see {root}/logs")
