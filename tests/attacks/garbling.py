"""A plugin: worker rollout-0 garbles a tenth of its results, as a process with a bug would.

The file in GARBLED gets a line for each: the bug, lease and member, and the SHA-256 of the sent
payload.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Episode, Result
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.system.links import wire
from arealite.system.links.worker_link import WorkerLink
from tests.payloads import pack, with_digests

FILE = Path(__file__)
SHARE = 0.1
FRAMES = 0.02
"""Share of whole messages that are cut off."""
MARK = b"\x07\0\0\0"
"""The token of readable garbled trajectories."""

Bug = Callable[[Episode, Payload], tuple[Episode, list[Payload]]]

replace = msgspec.structs.replace
rng = random.Random(16)
_submit, _encode = WorkerLink.submit, wire.encode


def marked(payload: Payload) -> Payload:
    """Return a payload of the same form with tokens that no policy sampled, and their digests."""
    tree = TrajectoryTree.decode(payload)
    turns = [
        replace(turn, added=MARK * (len(turn.added) // 4), ids=MARK * (len(turn.ids) // 4))
        for turn in tree.turns
    ]
    return with_digests(pack(MARK * (len(payload.prompt) // 4), turns))


def of_header(**facts: Any) -> Bug:
    """Return a bug that garbles a header; its trajectory has the marker token."""

    def garble(episode: Episode, payload: Payload) -> tuple[Episode, list[Payload]]:
        header = replace(episode.headers[0], digest=b"", **facts)
        return replace(episode, headers=[header]), [marked(payload)]

    return garble


def flip(episode: Episode, payload: Payload) -> tuple[Episode, list[Payload]]:
    """Flip a bit of the prompt or of the turns."""
    at = rng.randrange(payload.size)
    content = bytearray(payload.prompt + payload.turns)
    content[at] ^= 1 << rng.randrange(8)
    changed = bytes(content)
    end = len(payload.prompt)
    return episode, [Payload(prompt=changed[:end], turns=changed[end:])]


def with_turns(turns: Callable[[bytes], bytes]) -> Bug:
    return lambda episode, payload: (episode, [replace(payload, turns=turns(payload.turns))])


BUGS: dict[str, Bug] = {
    "a flipped bit": flip,
    "no payload": lambda episode, payload: (episode, []),
    "another payload": lambda episode, payload: (episode, [marked(payload)]),
    "random bytes": with_turns(lambda turns: rng.randbytes(len(turns))),
    "half of the payload": with_turns(lambda turns: turns[: len(turns) // 2]),
    "a reward of a million": of_header(reward=1e6),
    "a reward that is none": of_header(reward=math.nan),
    "a version of the future": of_header(newest_version=10**6),
    "lengths of another": of_header(segment_lengths=[1, 2, 3]),
    "a member of another": of_header(member=77),
}


def content_of(payload: Payload) -> bytes:
    return payload.prompt + payload.turns


def note(what: str, lease_id: str, member: int, payload: bytes) -> None:
    line = {"what": what, "lease": lease_id, "member": member, "sha": sha256(payload).hexdigest()}
    with open(os.environ["GARBLED"], "a", encoding="ascii") as file:
        file.write(json.dumps(line) + "\n")


def submit(self: WorkerLink, episode: Episode, payloads: list[Payload]) -> None:
    if len(payloads) == 1 and rng.random() < SHARE:
        what = rng.choice([*BUGS])
        episode, payloads = BUGS[what](episode, payloads[0])
        note(what, episode.lease_id, episode.member, b"".join(map(content_of, payloads)))
    _submit(self, episode, payloads)


def encode(message: Any) -> bytes:
    frame = _encode(message)
    if isinstance(message, Result) and message.episodes and rng.random() < FRAMES:
        note("half of the message", "", 0, frame[: len(frame) // 2])
        return frame[: len(frame) // 2]
    return frame


if sys.argv[1:3] == ["rollout", "0"] or sys.argv[1:4] == ["role", "rollout", "0"]:
    WorkerLink.submit = submit  # type: ignore[method-assign]
    wire.encode = encode  # type: ignore[assignment]
