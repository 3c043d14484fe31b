"""The updates of servers that a session has begun: of its default weights, and of adapters."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from arealite.api.publisher import PublishReport
from arealite.base.errors import RoleError
from arealite.ext.session.calls import Calls
from arealite.ext.session.policy import Policy

T = TypeVar("T")


class ServerUpdates:
    """Pushes the default weights in a thread of its own; waits for all updates at the end."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pusher = ThreadPoolExecutor(1, "session publish")
        self._pushed: Future[PublishReport] | None = None
        """The newest push."""
        self._of_adapters = set[Future[Any]]()

    def push(
        self,
        policy: Policy,
        version: int,
        *,
        confirm: Callable[[int], None],
        check_servers: Callable[[], None],
    ) -> Future[PublishReport]:
        """Begin to stage the default weights in the engine's thread, and then to send them.

        Args:
            policy: Has the weights.
            version: Their version.
            confirm: Is called with it once servers hold it.
            check_servers: Raises the error that has ended the servers.
        """
        staged = self._calls.submit(_stage, policy, version, self._pushed)

        def send() -> PublishReport:
            try:
                staged.result()
                report = policy.push(version)
            except (RoleError, CancelledError) as error:
                check_servers()
                raise RoleError(f"version {version} was not published: {error}") from error
            confirm(version)
            return report

        self._pushed = self._pusher.submit(send)
        return self._pushed

    def add(self, update: Future[T]) -> Future[T]:
        """Wait for the update of an adapter at the end; return it."""
        self._of_adapters.add(update)
        update.add_done_callback(self._of_adapters.discard)
        return update

    def close(self, *, cancel: bool) -> None:
        """Wait for all updates; with `cancel`, only for the push that runs."""
        self._pusher.shutdown(cancel_futures=cancel)
        if not cancel:
            wait(self._of_adapters)


def _stage(policy: Policy, version: int, pushed: Future[PublishReport] | None) -> None:
    """Stage the weights after the push of the version before."""
    if pushed is not None:
        wait([pushed])
    policy.stage(version)
