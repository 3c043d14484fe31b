"""The tree of a seat's turns, in which turns share the tokens of their prompts.

A prompt is hashed when its request is sent, incrementally: a long session costs linear time and
memory.
"""

from __future__ import annotations

from array import array

from arealite.api.turns import Turn, arrays, blake2b

RECENT = 32
"""Number of unextended turns of a seat whose tokens are kept in memory as one list."""


class Tree:
    """The turns of one seat: each extends the longest earlier turn that its prompt begins with."""

    def __init__(self) -> None:
        self.recent: list[Turn] = []
        """The last turns that no turn extends: their tokens are compared."""
        self.earlier: dict[tuple[bytes, float], Turn] = {}
        """All other turns by the digest of their tokens, and their temperature."""

    def place(self, turn: Turn) -> None:
        """Find the parent of a turn, and compute its prompt's digest."""
        ids, temperature, at = turn.tokens, turn.temperature, 0
        for tip in self.recent:
            end = tip.end
            is_near = at < end <= len(ids) and ids[end - 1] == tip.tokens[-1]
            if is_near and tip.temperature == temperature and ids[:end] == tip.tokens:
                turn.parent, at = tip, end
        turn.start = len(ids)
        turn.state = turn.parent.state.copy() if turn.parent else blake2b()
        turn.added = array("i", ids[at:]).tobytes()
        if turn.parent is None and self.earlier:
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
        turn.sampled = arrays(turn.response)
        turn.answer = blake2b(b"".join(turn.sampled)).digest()
        turn.state.update(turn.sampled[0])
        turn.tokens = turn.tokens + turn.response.output_ids
        turn.end = len(turn.tokens)
        self.recent.append(turn)
        for tip in [tip for tip in self.recent if tip is turn.parent] or self.recent[:-RECENT]:
            self.recent.remove(tip)
            self.earlier[tip.state.digest(), tip.temperature] = tip
            tip.tokens, tip.state = [], None

    def drop(self, turn: Turn) -> None:
        """Remove a turn: no later turn extends it."""
        self.recent = [tip for tip in self.recent if tip is not turn]
        self.earlier = {key: other for key, other in self.earlier.items() if other is not turn}
