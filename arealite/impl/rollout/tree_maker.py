"""Makes the tree of a trajectory from the turns of a seat, with exactly their tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from arealite.api.trajectory import TurnNode
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.api.turns import Turn, digest_of_answer


class SharedPrefix(NamedTuple):
    """The tokens at the start of a turn's prompt that an earlier turn has."""

    parent: int
    """Index of the earlier turn; -1: the prompt of the trajectory."""
    length: int


def make_tree(turns: Sequence[Turn]) -> TrajectoryTree:
    """Return the tree of turns, with exactly the tokens that were sent and sampled.

    A turn extends its parent: the longest turn whose prompt and output its prompt begins with, at
    the same temperature. Only one turn extends another. Any other turn begins a branch. It shares
    the tokens that its prompt has in common with its parent or with the turn before it.
    """
    nodes = list[TurnNode]()
    index_of = dict[Turn, int]()
    extendable = set[Turn]()
    for index, turn in enumerate(turns):
        parent = turn.parent
        while parent is not None and parent not in index_of:  # its answer was dropped
            parent = parent.parent
        if parent is not None and parent in extendable:
            extendable.remove(parent)
            shared = SharedPrefix(index_of[parent], parent.end)
            reason = ""
        else:
            shared = _shared_prefix(turn, parent, index_of)
            reason = _branch_reason(turn, parent, is_first=index == 0)
        nodes.append(_make_node(turn, parent, shared, reason))
        index_of[turn] = index
        extendable.add(turn)
    prompt = turns[0].raw_prompt if turns else b""
    return TrajectoryTree(prompt, nodes)


def _shared_prefix(turn: Turn, parent: Turn | None, index_of: dict[Turn, int]) -> SharedPrefix:
    """Return the longest prefix of a branch among its parent and the turn before it.

    Args:
        turn: The first turn of the branch.
        parent: Its nearest ancestor that is kept.
        index_of: The index of each earlier turn.
    """
    if not index_of:
        return SharedPrefix(-1, turn.start)  # the trajectory's prompt is its own
    before = next(reversed(index_of))
    num_common = _count_common(before.raw_prompt + before.sampled[0], turn.raw_prompt)
    shared = SharedPrefix(index_of[before], num_common)
    if parent is not None and parent.end > num_common:
        shared = SharedPrefix(index_of[parent], parent.end)
    return shared


def _branch_reason(turn: Turn, parent: Turn | None, *, is_first: bool) -> str:
    """Return why a turn begins a branch: the agent's reason, or one that follows from `parent`."""
    if turn.origin is not None and turn.origin.reason:
        return turn.origin.reason
    if is_first:
        return "first"
    return "forked" if parent is not None else "rewritten"


def _make_node(turn: Turn, parent: Turn | None, shared: SharedPrefix, reason: str) -> TurnNode:
    """Return the node of a turn whose nearest kept ancestor is `parent`."""
    if turn.origin is not None:
        reused = min(turn.origin.reused, turn.start)
    elif parent is not None:
        reused = parent.end
    else:
        reused = 0
    added = turn.added
    if shared.length != turn.num_known_tokens:
        added = turn.raw_prompt[4 * shared.length :]
    ids, logprobs, versions = turn.sampled
    extras = turn.extras
    routing_start, routing = _routing(turn, parent)
    return TurnNode(
        parent=shared.parent,
        shared=shared.length,
        added=added,
        ids=ids,
        logprobs=logprobs,
        versions=versions,
        reward=turn.reward,
        temperature=turn.temperature,
        reused=reused,
        reason=reason,
        prompt_digest=turn.prompt,
        answer_digest=digest_of_answer(ids, logprobs, versions, extras),
        next_state=turn.next_state,
        routing=routing,
        routing_start=routing_start,
        extras=extras,
    )


def _routing(turn: Turn, parent: Turn | None) -> tuple[int, bytes]:
    """Return the first recorded token and the experts of a turn.

    The records of its ancestors after `parent` come first, because their answers were dropped.
    """
    routing = turn.response.routing
    routing_start = turn.routing_start
    width = len(routing) // max(1, turn.end - 1 - routing_start)
    ancestor = turn.parent
    while routing and ancestor is not None and ancestor is not parent:
        num_bytes = (routing_start - ancestor.routing_start) * width
        routing = ancestor.response.routing[:num_bytes].ljust(num_bytes, b"\xff") + routing
        routing_start = ancestor.routing_start
        ancestor = ancestor.parent
    return routing_start, routing


def _count_common(tokens: bytes, other_tokens: bytes) -> int:
    """Return how many first tokens (int32) are equal, by binary search."""
    low = 0
    high = min(len(tokens), len(other_tokens)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[: 4 * middle] == other_tokens[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
