"""The tree of a seat's turns, in which turns share the tokens of their prompts.

A prompt is hashed when its request is sent, incrementally: a long session costs linear time and
memory.
"""

from __future__ import annotations

from array import array

import msgspec

from arealite.api.llm import LLMResponse
from arealite.api.turns import Turn, arrays, blake2b

RECENT = 32
"""Number of unextended turns of a seat whose tokens are kept in memory as one list."""


class Tree(msgspec.Struct):
    """The turns of one seat: each extends the longest earlier turn that its prompt begins with."""

    recent: list[Turn] = []
    """The last turns that no turn extends: their tokens are compared."""
    earlier: dict[tuple[bytes, float], Turn] = {}
    """All other turns by the digest of their tokens, and their temperature."""

    def place(self, turn: Turn, extends: LLMResponse | None = None) -> None:
        """Find the parent of a turn, and compute its prompt's digest and JSON.

        Args:
            turn: The turn.
            extends: A response that the caller built the prompt on: the prompt begins with the
                prompt and the tokens of this response, which are not compared again.
        """
        ids, parent, at = turn.tokens, None, 0
        turn.start = size = len(ids)
        for tip in self.recent:
            output, end = tip.response.output_ids, tip.end
            is_near = at < end <= size and ids[end - 1] == (output or tip.tokens)[-1]
            if not is_near or tip.temperature != turn.temperature:
                continue
            is_same = tip.response is extends or ids[: tip.start] == tip.tokens
            if is_same and ids[tip.start : end] == output:
                parent, at = tip, end
        turn.parent, turn.state = parent, parent.state.copy() if parent else blake2b()
        new = ids[at:] if at else ids
        turn.added = array("i", new).tobytes()
        turn.json = _joined(parent.json if parent else b"", new)
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
        turn.json = _joined(turn.json, turn.response.output_ids)
        turn.end = turn.start + len(turn.response.output_ids)
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
        turn.tokens, turn.state, turn.json = [], None, b""

    def drop(self, turn: Turn) -> None:
        """Remove a turn: no later turn extends it."""
        self.recent = [tip for tip in self.recent if tip is not turn]
        self.earlier = {key: other for key, other in self.earlier.items() if other is not turn}


def _joined(json: bytes, ids: list[int]) -> bytes:
    """Return the JSON of tokens after others, without brackets."""
    new = msgspec.json.encode(ids)[1:-1]
    return b"%b,%b" % (json, new) if json and new else json or new
