"""The tree of a trajectory's turns, and the segments that are trained.

A turn stores only what follows the tokens that it shares with an earlier turn, so no token is
stored twice.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec

from arealite.api.payloads import Payload
from arealite.api.trajectory import PlacedTurn, Segment, TurnNode

MAX_TOKENS = 1 << 24
"""Maximum tokens of all segments. A small payload therefore cannot fill the memory."""
MAX_ROUTING_BYTES = 1 << 30
"""Maximum bytes of the experts of all segments, for the same reason."""
MAX_STEPS = 1 << 22
"""Maximum steps from the last turns of all segments to the prompt, which bound the time."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TurnNode]).decode


class TrajectoryTree:
    """The turns of a trajectory; each follows a part of an earlier turn, or of the prompt."""

    def __init__(self, prompt: bytes, turns: Sequence[TurnNode]) -> None:
        """Compute where each turn begins and ends.

        Raises:
            msgspec.ValidationError: A turn follows something that does not exist.
        """
        self.prompt = prompt
        self.turns = turns
        self.starts = list[int]()
        """For each turn: the position of its first sampled token."""
        self.ends = list[int]()
        """For each turn: the length of its prompt and answer."""
        self._depths = [0]
        """The number of turns to the prompt: from the prompt itself, and from each turn."""
        for index, turn in enumerate(turns):
            if turn.parent >= index:
                raise msgspec.ValidationError(f"turn {index} follows turn {turn.parent}")
            num_before = self.ends[turn.parent] if turn.parent >= 0 else len(prompt) // 4
            if turn.shared > num_before:
                raise msgspec.ValidationError(
                    f"turn {index} shares {turn.shared} tokens, at most {num_before}"
                )
            arrays = (turn.ids, turn.logprobs, turn.versions)
            lengths = {len(values) for values in arrays}
            if len(lengths) > 1 or (len(prompt) | len(turn.ids) | len(turn.added)) % 4:
                raise msgspec.ValidationError(f"turn {index} has arrays of other lengths")
            start = turn.shared + len(turn.added) // 4
            end = start + len(turn.ids) // 4
            if not end:
                raise msgspec.ValidationError(f"turn {index} has no token")
            self.starts.append(start)
            self.ends.append(end)
            self._depths.append(self._depths[turn.parent + 1] + 1)

    @classmethod
    def decode(cls, payload: Payload) -> "TrajectoryTree":
        """Unpack a payload.

        Raises:
            msgspec.MsgspecError: The bytes are no payload.
        """
        try:
            return cls(payload.prompt, _decode(payload.turns))
        except UnicodeDecodeError as error:
            raise msgspec.ValidationError(str(error)) from error

    def encode(self) -> Payload:
        """Pack the tree."""
        return Payload(prompt=self.prompt, turns=_encode(self.turns))

    def tokens(self, index: int, stop: int) -> bytes:
        """Return the first `stop` tokens of a turn's prompt and answer, int32."""
        parts_backwards = list[bytes]()
        while index >= 0 and stop > 0:
            turn = self.turns[index]
            if stop > turn.shared:
                after_shared = turn.added + turn.ids
                parts_backwards.append(after_shared[: 4 * (stop - turn.shared)])
                stop = turn.shared
            index = turn.parent
        parts_backwards.append(self.prompt[: 4 * stop])
        return b"".join(reversed(parts_backwards))

    @cached_property
    def paths(self) -> list[list[int]]:
        """The turns of each segment: each turn extends the turn before it.

        The segments are in the order of their last turns.

        Raises:
            msgspec.ValidationError: A turn extends a turn that another one extends, or only a part
                of it, or a turn of another temperature; or the segments would be too large.
        """
        paths_by_end = dict[int, list[int]]()
        for index, turn in enumerate(self.turns):
            path = list[int]()
            if not turn.reason:
                self._check_extends(index)
                if turn.parent not in paths_by_end:
                    raise msgspec.ValidationError(f"turn {turn.parent} is extended twice")
                path = paths_by_end.pop(turn.parent)
            path.append(index)
            paths_by_end[index] = path
        self._check_size(paths_by_end)
        return list(paths_by_end.values())

    def _check_size(self, last_turns: Iterable[int]) -> None:
        """Check that the segments that end with `last_turns` do not take too much.

        Raises:
            msgspec.ValidationError: They do.
        """
        num_tokens = 0
        num_steps = 0
        num_routing_bytes = 0
        for last in last_turns:
            num_tokens += self.ends[last]
            num_steps += self._depths[last + 1]
            num_routing_bytes += self.ends[last] * self._routing_width(last)
        is_too_long = num_tokens > MAX_TOKENS or num_steps > MAX_STEPS
        if is_too_long or num_routing_bytes > MAX_ROUTING_BYTES:
            raise msgspec.ValidationError(
                f"segments of {num_tokens} tokens, {num_steps} turns "
                f"and {num_routing_bytes} bytes of experts are too large"
            )

    def _check_extends(self, index: int) -> None:
        """Check that a turn extends its parent.

        Raises:
            msgspec.ValidationError: It does not.
        """
        turn = self.turns[index]
        is_extension = turn.parent >= 0 and turn.shared == self.ends[turn.parent]
        if not is_extension or turn.temperature != self.turns[turn.parent].temperature:
            raise msgspec.ValidationError(f"turn {index} does not extend turn {turn.parent}")

    @property
    def segment_lengths(self) -> list[int]:
        """Number of tokens of each segment."""
        return [self.ends[path[-1]] for path in self.paths]

    def segments(self) -> list[Segment]:
        """Return the segments. A token that several segments share is trained in one of them.

        Raises:
            msgspec.ValidationError: as `paths`.
        """
        return [self._segment(path) for path in self.paths]

    def _segment(self, path: Sequence[int]) -> Segment:
        mask_parts: list[bytes] = []  # list[bytes]() takes 0.3 µs more
        logprob_parts: list[bytes] = []
        version_parts: list[bytes] = []
        placed_turns: list[PlacedTurn] = []
        last = path[-1]
        rewards_T = array("f", bytes(4 * self.ends[last]))
        end = 0  # tokens of the turns so far
        for index in path:
            turn = self.turns[index]
            start = self.starts[index]
            num_observed = start - end
            end = self.ends[index]
            length = end - start
            mask_parts += bytes(num_observed), b"\x01" * length
            logprob_parts += bytes(4 * num_observed), turn.logprobs
            version_parts += b"\xff" * (4 * num_observed), turn.versions
            rewards_T[end - 1] += turn.reward
            placed_turns.append(PlacedTurn(start=start, length=length, node=turn))
        return Segment(
            tokens=self.tokens(last, end),
            loss_mask=b"".join(mask_parts),
            logprobs=b"".join(logprob_parts),
            versions=b"".join(version_parts),
            rewards=rewards_T.tobytes(),
            temperature=self.turns[last].temperature,
            turns=placed_turns,
            routing=self._routing(last),
        )

    def _routing_width(self, index: int) -> int:
        """Return the number of bytes for the experts of one token; 0 without a record."""
        turn = self.turns[index]
        num_recorded = self.ends[index] - 1 - turn.routing_start  # the last token is no input
        return len(turn.routing) // max(1, num_recorded)

    def _routing(self, index: int) -> bytes:
        """Return the experts of all tokens of a turn, as in `Segment.routing`.

        The tokens before its own record have the experts of the turns before it.
        """
        width = self._routing_width(index)
        if not width:
            return b""
        no_experts = b"\xff" * width
        parts_backwards = [no_experts]
        stop = self.ends[index] - 1
        while index >= 0 and stop:
            turn = self.turns[index]
            has_record = self._routing_width(index) == width
            if has_record and turn.routing_start < stop:
                num_bytes = (stop - turn.routing_start) * width
                parts_backwards.append(turn.routing[:num_bytes].ljust(num_bytes, b"\xff"))
                stop = turn.routing_start
            index = turn.parent
        parts_backwards.append(no_experts * stop)
        return b"".join(reversed(parts_backwards))
