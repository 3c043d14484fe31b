"""The tree of a seat's turns, in which turns share the tokens of their prompts.

A prompt is hashed when its request is sent, incrementally: a long session costs linear time and
memory.
"""

from collections.abc import Sequence

import msgspec

from arealite.api.llm import LLMResponse
from arealite.api.turns import NOTHING, Turn, blake2b, pack

ROOT = Turn(response=NOTHING, temperature=0.0, state=blake2b())
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
    parent = ROOT
    if turns:
        parent = _find_parent(ids, turn.temperature, turns, extends)
    added_ids = ids[parent.end :]
    turn.parent = parent
    turn.start = len(ids)
    turn.added = pack("i", added_ids)
    turn.state = parent.state.copy()
    turn.state.update(parent.sampled[0] + turn.added)
    turn.prompt = turn.state.digest()
    turn.json = _prompt_json(parent, ids, added_ids)


def _prompt_json(parent: Turn, ids: list[int], added_ids: list[int]) -> bytes:
    """Return a prompt in JSON; if possible, by continuing the JSON of the parent's prompt."""
    if not parent.json:
        return encode(ids)
    ids_after_parent = parent.response.output_ids + added_ids
    if not ids_after_parent:
        return encode(ids)
    without_bracket = memoryview(parent.json)[:-1]
    return b",".join((without_bracket, encode(ids_after_parent)[1:]))


def _find_parent(
    ids: list[int], temperature: float, turns: Sequence[Turn], extends: LLMResponse | None
) -> Turn:
    """Return `extends`, or the longest turn that a prompt begins with; the root if none does."""
    for turn in reversed(turns):
        if turn.response is extends and turn.temperature == temperature:
            return turn
    prompt = pack("i", ids)
    longest = ROOT
    prefixes = {ROOT}
    for turn in turns:  # a parent is before its children
        if turn.parent not in prefixes or turn.temperature != temperature:
            continue
        has_prompt = prompt.startswith(turn.added, 4 * turn.num_known_tokens)
        has_output = prompt.startswith(turn.sampled[0], 4 * turn.start)
        if has_prompt and has_output:
            prefixes.add(turn)
            if turn.end >= longest.end:
                longest = turn
    return longest
