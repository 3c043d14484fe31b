"""Records finished turns of running episodes, and reads them back in the next attempt.

Only episodes of resumable environments are recorded. When their worker crashes, the datapipe sends
the recorded turns with the next lease.
"""

from __future__ import annotations

from collections.abc import Sequence

from arealite.api.agent import Agent
from arealite.api.rollout_messages import Lease, TurnHeader
from arealite.api.turns import StoredTurn, Turn, decode_turn


def recorded_turns(
    lease: Lease, member: int, seat: str, payloads: Sequence[bytes]
) -> tuple[StoredTurn, ...]:
    """Return the recorded turns of a seat, by index."""
    pairs = zip(lease.turns, payloads, strict=True)
    found = [decode_turn(raw) for turn, raw in pairs if (turn.member, turn.seat) == (member, seat)]
    return tuple(sorted(found, key=lambda stored: stored.index))


def unsent_turns(agent: Agent, *, resend_all: bool) -> list[Turn]:
    """Return an agent's turns that were not sent to the datapipe, in order; mark them as sent.

    Args:
        resend_all: return the sent turns, too.
    """
    known = [*agent.record.turns, *agent.record.partial.values()]
    turns = [turn for turn in known if resend_all or not turn.is_stored]
    for turn in turns:
        turn.is_stored = True
    return sorted(turns, key=lambda turn: turn.index)


def turn_header(lease: Lease, member: int, agent: Agent, turn: Turn) -> TurnHeader:
    """Return the header of a turn.

    The turn of an untrained seat gets the version of the lease, so that it is never too old.
    """
    versions = turn.response.versions if agent.trainable else []
    oldest = min(versions, default=lease.version)
    return TurnHeader(member, agent.seat.name, turn.index, oldest)
