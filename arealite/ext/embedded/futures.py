"""Runs a command for a future that another thread waits for."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def resolve(future: Future[T], command: Callable[[], T]) -> None:
    """Run a command and store its result in `future`, unless the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command())
    except Exception as error:  # noqa: BLE001  (raised in the thread that waits)
        future.set_exception(error)
