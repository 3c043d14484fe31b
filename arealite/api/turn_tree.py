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
        self.ends: dict[tuple[bytes, float], Turn] = {}
        """All turns by the digest of their tokens, and their temperature."""

    def place(self, turn: Turn) -> None:
        """Find the parent of a turn whose `added` is its whole prompt, and the prompt's digest."""
        ids, temperature = turn.added, turn.temperature
        turn.tokens, turn.start, turn.state, at = ids, len(ids), blake2b(), 0
        for tip in self.recent:
            end = len(tip.tokens)
            is_near = at < end <= len(ids) and ids[end - 1] == tip.tokens[-1]
            if is_near and tip.temperature == temperature and ids[:end] == tip.tokens:
                turn.parent, turn.state, at = tip, tip.state.copy(), end
        raw = array("i", ids[at:]).tobytes()
        if turn.parent is None:  # a branch: compare digests where earlier turns end
            ends = {other.end() for other in self.ends.values()}
            for end in sorted([end for end in ends if end <= len(ids)]):
                turn.state.update(raw[4 * at : 4 * end])
                found, at = self.ends.get((turn.state.digest(), temperature)), end
                turn.parent = found or turn.parent
            raw = raw[4 * at :]
        turn.state.update(raw)
        turn.prompt = turn.state.digest()
        turn.added = ids[turn.parent.end() :] if turn.parent else ids

    def add(self, turn: Turn) -> None:
        """Add a placed turn whose response has arrived."""
        each = arrays(turn.response)
        turn.answer = blake2b(b"".join(each)).digest()
        turn.state.update(each[0])
        turn.tokens = turn.tokens + turn.response.output_ids
        self.ends[turn.state.digest(), turn.temperature] = turn
        forgotten = [tip for tip in self.recent if tip is turn.parent] or self.recent[: 1 - RECENT]
        for tip in forgotten:
            self.recent.remove(tip)
            tip.tokens, tip.state = [], None
        self.recent.append(turn)

    def drop(self, turn: Turn) -> None:
        """Remove a turn: no later turn extends it."""
        self.recent = [tip for tip in self.recent if tip is not turn]
        self.ends = {key: other for key, other in self.ends.items() if other is not turn}
