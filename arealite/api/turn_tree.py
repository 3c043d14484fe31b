"""The tree of a seat's turns, in which turns share the tokens of their prompts.

A prompt is hashed when its request is sent, incrementally: a long session costs linear time and
memory.
"""

from __future__ import annotations

from array import array

import msgspec

from arealite.api.turns import Turn, arrays, blake2b

RECENT = 32
"""Number of unextended turns of a seat whose tokens are kept in memory as one list."""


class Tree(msgspec.Struct):
    """The turns of one seat: each extends the longest earlier turn that its prompt begins with."""

    recent: list[Turn] = []
    """The last turns that no turn extends: their tokens are compared."""
    earlier: dict[tuple[bytes, float], Turn] = {}
    """All other turns by the digest of their tokens, and their temperature."""

    def place(self, turn: Turn) -> None:
        """Find the parent of a turn, and compute its prompt's digest."""
        ids, parent, at = turn.tokens, None, 0
        turn.start = size = len(ids)
        for tip in self.recent:
            is_near = at < tip.end <= size and ids[tip.end - 1] == tip.tokens[-1]
            if is_near and ids[: tip.end] == tip.tokens and tip.temperature == turn.temperature:
                parent, at = tip, tip.end
        turn.parent, turn.state = parent, parent.state.copy() if parent else blake2b()
        turn.added = array("i", ids[at:] if at else ids).tobytes()
        if parent is None and self.earlier:
            self._branch(turn)
        else:
            turn.state.update(turn.added)
        turn.prompt = turn.state.digest()

    def _branch(self, turn: Turn) -> None:
        """Find the parent of a turn by the digests of its prompt where earlier turns end."""
        raw, at = turn.added, 0
        for end in sorted({earlier.end for earlier in self.earlier.values()}):
            if end > turn.start:
                break
            turn.state.update(raw[4 * at : 4 * end])
            at, key = end, (turn.state.digest(), turn.temperature)
            if (found := self.earlier.get(key)) is not None:
                turn.parent, turn.added = found, raw[4 * end :]
        turn.state.update(raw[4 * at :])

    def add(self, turn: Turn) -> None:
        """Add a placed turn whose response has arrived."""
        turn.sampled = sampled = arrays(turn.response)
        turn.answer = blake2b(b"".join(sampled)).digest()
        turn.state.update(sampled[0])
        turn.tokens = turn.tokens + turn.response.output_ids
        turn.end = len(turn.tokens)
        recent = self.recent
        recent.append(turn)
        if turn.parent in recent:
            self._forget(turn.parent)
        elif len(recent) > RECENT:
            self._forget(recent[0])

    def _forget(self, turn: Turn) -> None:
        """Drop the tokens of a turn; keep their digest."""
        self.recent.remove(turn)
        self.earlier[turn.state.digest(), turn.temperature] = turn
        turn.tokens, turn.state = [], None

    def drop(self, turn: Turn) -> None:
        """Remove a turn: no later turn extends it."""
        self.recent = [tip for tip in self.recent if tip is not turn]
        self.earlier = {key: other for key, other in self.earlier.items() if other is not turn}
