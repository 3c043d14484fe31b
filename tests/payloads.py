"""Makes payloads from segments, whose runs of sampled tokens become turns without digests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from arealite.api.payloads import Payload, to_frames
from arealite.api.rollout_messages import Episode, Result
from arealite.api.trajectory import Segment, TurnNode
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.api.turns import digest, digest_of_answer
from arealite.ext.older_runs.segments import OldSegment, tree_of

GARBAGE = Payload(prompt=b"", turns=b"garbage")
"""Cannot be decoded."""
FIELDS = ("tokens", "loss_mask", "logprobs", "versions", "rewards", "temperature", "routing")


def encode_segments(segments: Sequence[Segment]) -> Payload:
    """Return the payload of segments; the prompt of the first one stands beside the turns."""
    old = [OldSegment(**{name: getattr(segment, name) for name in FIELDS}) for segment in segments]
    tree = TrajectoryTree.decode(Payload(prompt=b"", turns=tree_of(old)))
    if not tree.turns:
        return tree.encode()
    first, *others = tree.turns
    start = tree.starts[0]
    without_prompt = msgspec.structs.replace(first, shared=start, added=b"")
    return TrajectoryTree(first.added, [without_prompt, *others]).encode()


def change_turn(payload: Payload, index: int = 0, **fields: object) -> Payload:
    """Return a payload with changed fields of one turn; its digests are not made anew."""
    tree = TrajectoryTree.decode(payload)
    turns = [*tree.turns]
    turns[index] = msgspec.structs.replace(turns[index], **fields)
    return pack(tree.prompt, turns)


def pack(prompt: bytes, turns: Sequence[TurnNode]) -> Payload:
    """Return the payload of turns that may contradict each other."""
    return Payload(prompt=prompt, turns=msgspec.msgpack.encode(turns))


def with_digests(payload: Payload) -> Payload:
    """Return a payload whose turns have the digests that a worker makes."""
    tree = TrajectoryTree.decode(payload)
    turns = [
        msgspec.structs.replace(
            turn,
            prompt_digest=digest(tree.tokens(index, tree.starts[index])),
            answer_digest=digest_of_answer(turn.ids, turn.logprobs, turn.versions, turn.extras),
        )
        for index, turn in enumerate(tree.turns)
    ]
    return pack(tree.prompt, turns)


def result_frames(
    worker_id: str, episodes: Sequence[Episode], payloads: Sequence[Payload]
) -> tuple[Result, list[bytes]]:
    """Return a result and the frames that follow it."""
    prompts, frames = to_frames(payloads)
    return Result(worker_id=worker_id, episodes=[*episodes], prompts=prompts), frames


def decode_segments(payload: Payload) -> list[Segment]:
    """Unpack the segments of a payload.

    Raises:
        msgspec.MsgspecError: The bytes are no payload.
    """
    return TrajectoryTree.decode(payload).segments()
