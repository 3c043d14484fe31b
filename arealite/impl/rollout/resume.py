"""Records finished turns of running episodes, and reads them back in the next attempt.

Only episodes of resumable environments are recorded. When their worker crashes, the datapipe sends
the recorded turns with the next lease.
"""

from __future__ import annotations

from collections.abc import Sequence

from arealite.api.agent import Agent
from arealite.api.episode import StoredTurn, Turn, decode_turn
from arealite.api.rollout_messages import Lease, TurnHeader


def recorded(
    lease: Lease, member: int, seat: str, payloads: Sequence[bytes]
) -> tuple[StoredTurn, ...]:
    """Return the recorded turns of a seat, up to the first that is missing."""
    found: list[StoredTurn] = []
    for turn, payload in zip(lease.turns, payloads, strict=True):
        if (turn.member, turn.seat, turn.index) == (member, seat, len(found)):
            found.append(decode_turn(payload))
    return tuple(found)


def unsent(agent: Agent, *, anew: bool) -> list[Turn]:
    """Return an agent's turns that were not sent to the datapipe, in order; mark them as sent."""
    record, turns = agent.record, list[Turn]()
    for turn in reversed(record.turns):
        if turn.is_stored and not anew:
            break
        turns.append(turn)
    turns += [turn for turn in record.partial.values() if anew or not turn.is_stored]
    for turn in turns:
        turn.is_stored = True
    return sorted(turns, key=lambda turn: turn.index)


def turn_header(lease: Lease, member: int, agent: Agent, turn: Turn) -> TurnHeader:
    """Return the header of a turn; turns of seats that are not trained are never too old."""
    versions = turn.response.versions if agent.trainable else []
    oldest = min(versions, default=lease.version)
    return TurnHeader(member, agent.seat.name, turn.index, oldest)
