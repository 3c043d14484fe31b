"""A plugin for `bench_start`: a role creates a file when it is ready.

A worker is ready when the datapipe answers it: with leases, if there are any. A trainer is ready at
its first batch. The file's name is the process id; READY_MARKS is its folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from arealite.system.links.trainer_link import TrainerLink
from arealite.system.links.worker_link import WorkerLink


def mark() -> None:
    """Create the file of this process."""
    (Path(os.environ["READY_MARKS"]) / str(os.getpid())).touch()


_receive = WorkerLink._receive
_next_batch = TrainerLink.next_batch


def receive(self, frames):
    """Handle a message of the datapipe, and mark the process as ready."""
    mark()
    return _receive(self, frames)


def next_batch(self, step, *, on_wait=None):
    """Return the next batch, and mark the process as ready."""
    batch = _next_batch(self, step, on_wait=on_wait)
    mark()
    return batch


WorkerLink._receive = receive
TrainerLink.next_batch = next_batch
