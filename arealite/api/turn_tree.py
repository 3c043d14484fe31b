"""The tree of a seat's turns, in which turns share the tokens of their prompts.

A prompt is hashed when its request is sent, incrementally: a long session costs linear time and
memory.
"""

from collections.abc import Sequence

import msgspec

from arealite.api.llm import LLMResponse
from arealite.api.turns import NOTHING, Turn, blake2b, pack

ROOT = Turn(NOTHING, 0.0, state=blake2b())
"""The root of all trees: the empty prompt."""
encode = msgspec.json.Encoder().encode


def place(turn: Turn, ids: list[int], turns: Sequence[Turn], extends: LLMResponse | None) -> None:
    """Find the parent of a turn, and compute its prompt's digest and JSON.

    Args:
        turn: The turn.
        ids: Its prompt.
        turns: The finished turns of its seat, in the order of their ends.
        extends: A response that the caller built the prompt on: the prompt begins with the prompt
            and the tokens of this response, which are not compared again. None: unknown.
    """
    parent = _longest(ids, turn.temperature, turns, extends) if turns else ROOT
    new = ids[parent.end :]
    turn.parent = parent
    turn.start = len(ids)
    turn.added = pack("i", new)
    turn.state = parent.state.copy()
    turn.state.update(parent.sampled[0] + turn.added)
    turn.prompt = turn.state.digest()
    if parent.json and (more := parent.response.output_ids + new):
        turn.json = b",".join((memoryview(parent.json)[:-1], encode(more)[1:]))
    else:
        turn.json = encode(ids)


def _longest(
    ids: list[int], temperature: float, turns: Sequence[Turn], extends: LLMResponse | None
) -> Turn:
    """Return `extends`, or the longest turn that a prompt begins with; the root if none does."""
    for turn in reversed(turns):
        if turn.response is extends and turn.temperature == temperature:
            return turn
    raw = pack("i", ids)
    best = ROOT
    found = {ROOT}
    for turn in turns:  # a parent is before its children
        if turn.parent in found and turn.temperature == temperature:
            is_prompt = raw.startswith(turn.added, 4 * turn.known)
            if is_prompt and raw.startswith(turn.sampled[0], 4 * turn.start):
                found.add(turn)
                best = turn if turn.end >= best.end else best
    return best
