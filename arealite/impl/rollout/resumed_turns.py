"""Records finished turns of running episodes, and reads them back in the next attempt.

Only episodes of resumable environments are recorded. When their worker crashes, the datapipe sends
the recorded turns with the next lease.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from arealite.api.agent import Agent
from arealite.api.rollout_messages import Lease, TurnHeader
from arealite.api.turns import StoredTurn, decode_turn, encode_turn


def recorded_turns(
    lease: Lease,
    member: int,
    seat: str,
    payloads: Sequence[bytes],
) -> tuple[StoredTurn, ...]:
    """Return the recorded turns of a seat, by index."""
    stored_turns = list[StoredTurn]()
    for header, payload in zip(lease.turns, payloads, strict=True):
        if header.member != member or header.seat != seat:
            continue
        with suppress(msgspec.MsgspecError):  # an older AReaLite wrote it: it is sampled again
            stored_turns.append(decode_turn(payload))
    stored_turns.sort(key=lambda stored_turn: stored_turn.index)
    return tuple(stored_turns)


def unsent_turns(
    lease: Lease,
    member: int,
    agents: Iterable[Agent],
    *,
    resend_all: bool,
) -> Iterator[tuple[TurnHeader, bytes]]:
    """Yield header and payload of the turns that were not sent, and mark these turns as sent.

    The turn of an untrained seat gets the version of the lease, so that it is never too old.

    Args:
        lease: The lease of the episode.
        member: The episode's number in the lease's group.
        agents: The agents of the episode.
        resend_all: Yield the sent turns, too.
    """
    for agent in agents:
        turns = [*agent.record.turns, *agent.record.partial.values()]
        for turn in sorted(turns, key=lambda turn: turn.index):
            if turn.is_stored and not resend_all:
                continue
            turn.is_stored = True
            versions = turn.response.versions if agent.trainable else []
            header = TurnHeader(
                member=member,
                seat=agent.seat.name,
                index=turn.index,
                oldest_version=min(versions, default=lease.version),
            )
            yield header, encode_turn(turn)
