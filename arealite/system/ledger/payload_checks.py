"""Compares a payload with its header and its digests: lengths, versions, rewards and tokens.

The datapipe calls `find_mismatch` before it stores a payload, a trainer rank before it trains one,
and the audit for every stored payload.
Shape letters: T = tokens of all turns, N = those that were sampled.
"""

import math

import msgspec
import numpy as np

from arealite.api.llm import MAX_TOP
from arealite.api.payloads import Payload
from arealite.api.trajectory import TrajectoryHeader, TurnNode
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.api.turns import blake2b, digest_of_answer

ROUNDING = 1e-5
"""Relative tolerance between the rewards of turns, float32 in older runs, and the header's."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)
MIN_TEMPERATURE = 1e-6
"""Lowest sampling temperature of trained trajectories: training divides logits by it."""


def find_mismatch(
    header: TrajectoryHeader,
    payload: Payload,
    *,
    vocab_size: int = 1 << 31,
    min_temperature: float = 0.0,
) -> str:
    """Return the name of the first difference between a payload and its header; "" if they agree.

    Args:
        header: The trajectory's header.
        payload: Its tree of turns.
        vocab_size: Number of token ids of the model; the default accepts all.
        min_temperature: Lowest accepted sampling temperature.
    """
    _, mismatch = decode_checked(
        header, payload, vocab_size=vocab_size, min_temperature=min_temperature
    )
    return mismatch


def decode_checked(
    header: TrajectoryHeader,
    payload: Payload,
    *,
    vocab_size: int = 1 << 31,
    min_temperature: float = 0.0,
) -> tuple[TrajectoryTree, str]:
    """Return the tree of a payload, empty if unreadable, and what `find_mismatch` returns."""
    tree = TrajectoryTree(b"", [])
    if header.digest and header.digest != payload.digest:
        return tree, "garbled"
    try:
        tree = TrajectoryTree.decode(payload)
        mismatch = _tree_mismatch(
            header, tree, vocab_size=vocab_size, min_temperature=min_temperature
        )
    except msgspec.MsgspecError as error:
        mismatch = f"unreadable: {error}"
    return tree, mismatch


def _tree_mismatch(
    header: TrajectoryHeader,
    tree: TrajectoryTree,
    *,
    vocab_size: int,
    min_temperature: float,
) -> str:
    """Return the first difference between a tree and the header; "" if they agree.

    Raises:
        msgspec.ValidationError: its turns extend each other in a way that is not possible.
    """
    for start, turn in zip(tree.starts, tree.turns, strict=True):
        if flaw := _turn_flaw(start, turn, min_temperature):
            return flaw
    lengths = tree.segment_lengths
    if not lengths or lengths != header.segment_lengths:
        return "length"
    return (
        _array_flaw(header, tree, vocab_size)
        or _reward_flaw(header, tree)
        or _receipts_flaw(header, tree)
    )


def _turn_flaw(start: int, turn: TurnNode, min_temperature: float) -> str:
    """Return what is wrong with a turn whose answer begins at `start`; "" if nothing is."""
    num_sampled = len(turn.ids) // 4
    if num_sampled and not start:
        return "a sampled token has no prefix"
    for values in turn.extras.values():
        if values and (not num_sampled or len(values) % num_sampled):
            return "arrays of other lengths"
    if turn.routing:
        num_recorded = start + num_sampled - 1 - turn.routing_start
        if num_recorded < 1 or len(turn.routing) % num_recorded:
            return "arrays of other lengths"
    if not min_temperature <= turn.temperature < math.inf:
        return "temperature"
    return ""


def _receipts_flaw(header: TrajectoryHeader, tree: TrajectoryTree) -> str:
    """Return the first difference between the turns and their digests; "" if they agree."""
    if not any(turn.prompt_digest for turn in tree.turns):  # an older AReaLite makes none
        return ""
    if len(tree.turns) != header.turns:
        return "receipt: number"
    for path in tree.paths:
        if flaw := _receipt_flaw(tree, path):
            return flaw
    return ""


def _receipt_flaw(tree: TrajectoryTree, path: list[int]) -> str:
    """Return the first difference between the turns of a segment and their digests; "" if none.

    They agree if each trained token is an answer's, as it arrived, after the prompt that was sent.
    """
    last = path[-1]
    tokens = memoryview(tree.tokens(last, tree.ends[last]))
    prompt_hash = blake2b()
    num_hashed = 0
    for index in path:
        turn = tree.turns[index]
        begin = tree.starts[index]
        if turn.reused > begin:
            return "receipt: range"
        prompt_hash.update(tokens[4 * num_hashed : 4 * begin])
        if prompt_hash.digest() != turn.prompt_digest:
            return f"receipt: prompt of {begin} tokens"
        answer_digest = digest_of_answer(turn.ids, turn.logprobs, turn.versions, turn.extras)
        if answer_digest != turn.answer_digest:
            return f"receipt: answer after {begin} tokens"
        num_hashed = begin
    return ""


def _array_flaw(header: TrajectoryHeader, tree: TrajectoryTree, vocab_size: int) -> str:
    """Return the first difference between the arrays and the header; "" if they agree.

    The arrays of all turns are joined: one numpy call costs as much as 1,000 tokens.
    """
    id_parts = [tree.prompt]
    for turn in tree.turns:
        id_parts += turn.added, turn.ids
    ids_T = np.frombuffer(b"".join(id_parts), "<u4")
    if np.maximum.reduce(ids_T) >= vocab_size:  # as uint32, negative ids are large too
        return "tokens"
    logprobs_N = np.frombuffer(b"".join([turn.logprobs for turn in tree.turns]), "<f4")
    if not _is_finite(logprobs_N):
        return "logprobs"
    if not all(_has_valid_top(turn, vocab_size) for turn in tree.turns if turn.extras):
        return "most probable tokens"
    num_sampled = len(logprobs_N)
    if num_sampled != header.trained_tokens or not num_sampled:
        return "length"
    versions_N = np.frombuffer(b"".join([turn.versions for turn in tree.turns]), "<i4")
    oldest = np.minimum.reduce(versions_N)
    newest = np.maximum.reduce(versions_N)
    if oldest != header.oldest_version or newest != header.newest_version:
        return "versions"
    return ""


def _has_valid_top(turn: TurnNode, vocab_size: int) -> bool:
    """Return whether the most probable tokens of a turn, if it has any, are possible."""
    ids = np.frombuffer(turn.extras.get("top_ids", b""), "<i4")
    logprobs = np.frombuffer(turn.extras.get("top_logprobs", b""), "<f4")
    if len(ids) != len(logprobs) or len(ids) > MAX_TOP * len(turn.ids) // 4:
        return False
    is_token = ids >= 0
    has_logprobs = bool((logprobs[is_token] <= ROUNDING).all())  # also False if one is not a number
    return has_logprobs and ids.max(initial=-1) < vocab_size


def _reward_flaw(header: TrajectoryHeader, tree: TrajectoryTree) -> str:
    """Return "reward" if the rewards of the turns do not add up to the header's; else ""."""
    rewards = [turn.reward for turn in tree.turns]
    magnitude = sum(map(abs, rewards))
    if not magnitude <= MAX_FLOAT32:  # also if one is not a number
        return "reward"
    difference = abs(sum(rewards) - (header.reward or 0.0))
    return "" if difference <= ROUNDING * magnitude else "reward"


def _is_finite(array: np.ndarray) -> bool:
    # The dot product with itself is the fastest test; isfinite decides if it overflows.
    return math.isfinite(array.dot(array)) or bool(np.isfinite(array).all())
