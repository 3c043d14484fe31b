"""The effects of the datapipe's machine: messages to send, and work between commits.

The machine appends effects to an `Outbox`; the process takes them after each input and performs
them in their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from arealite.api.trainer_messages import BatchRequest, Unusable
from arealite.system.datapipe.workers import ActiveLease, Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a message to a peer."""

    route: bytes
    """ZeroMQ route of the peer."""
    message: msgspec.Struct
    payloads: Sequence[bytes] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SendLease:
    """Send a lease to its worker, with the stored turns of its unfinished episodes."""

    worker: Worker
    active: ActiveLease


@dataclass(frozen=True, kw_only=True, slots=True)
class SendBatch:
    """Send a rank its shard of a batch, unless the batch was rolled back meanwhile."""

    route: bytes
    request: BatchRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginTraining:
    """Call `begin_training` of the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterGroups:
    """Call `filter_groups` of the machine with this effect."""

    route: bytes
    request: Unusable


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditLedger:
    """Start an audit of the new records."""


Effect = Send | SendLease | SendBatch | BeginTraining | FilterGroups | AuditLedger


@dataclass(frozen=True, kw_only=True, slots=True)
class AfterCommit:
    """Commit the writes queued so far, and perform an effect once they are durable."""

    effect: Effect | None
    """None: only commit."""
    hurry: bool = False
    """Whether to commit now, in a transaction of its own: a process is blocked until then."""


class Outbox:
    """Effects that are not performed yet, in their order."""

    def __init__(self) -> None:
        self._effects: list[Effect | AfterCommit] = []

    def send(self, route: bytes, message: msgspec.Struct, payloads: Sequence[bytes] = ()) -> None:
        """Send a message to a ZeroMQ route."""
        self._effects.append(Send(route=route, message=message, payloads=payloads))

    def perform(self, effect: Effect) -> None:
        """Perform an effect."""
        self._effects.append(effect)

    def after_commit(self, effect: Effect | None, *, hurry: bool = False) -> None:
        """Perform an effect once all writes queued so far are durable; see AfterCommit."""
        self._effects.append(AfterCommit(effect=effect, hurry=hurry))

    def take(self) -> Sequence[Effect | AfterCommit]:
        """Return and remove all effects."""
        effects = self._effects
        self._effects = []
        return effects
