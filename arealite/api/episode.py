"""The data of an agent in an episode: its seat, its actions, and the record of its turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import msgspec

from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.observation import ToolCall
from arealite.api.turns import NOTHING, Origin, StoredTurn, Turn, arrays, blake2b, pack
from arealite.base.errors import RewardNotFinite

RECENT = 32
"""Number of turns of a seat whose prompts are kept in memory as JSON."""

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


class Action(msgspec.Struct, frozen=True):
    """The result of `Agent.act`."""

    text: str
    """The decoded completion, for the environment; never tokenised again."""
    response: LLMResponse | None = None
    """The generation with this completion; None without a generation."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls in their order, malformed ones included."""
    is_last: bool = False
    """Whether the agent has reached its limit of turns or tokens and does not act again."""


class EpisodeRecord(msgspec.Struct, kw_only=True):
    """The turns and counters of one agent in one episode."""

    turns: list[Turn] = []
    """In the order of their ends; the turns of concurrent requests have any order."""
    partial: dict[int, Turn] = {}
    """Unfinished generations at their last interruption, by index."""
    recorded: list[StoredTurn] = []
    """Generations of an earlier attempt, by index, whose worker crashed; each is reused once."""
    next_index: int = 0
    resumed_tokens: int = 0
    """Tokens taken from `recorded` instead of a server."""
    resumed_diverged: int = 0
    """1: a generation was not recorded while others of the record were unused."""
    reward_parts: dict[str, float] = {}
    is_unscored: bool = False
    """Whether a reward was None: the episode has no reward for this agent."""
    generations: int = 0
    """Number of started generations."""
    seconds_generating: float = 0.0
    seconds_scoring: float = 0.0
    """Filled by environments that wait for a reward function."""

    def __post_init__(self) -> None:
        if self.recorded:
            self.next_index = 1 + self.recorded[-1].index

    def begin(
        self,
        input_ids: list[int],
        sampling: SamplingConfig,
        origin: Origin | None = None,
        extends: LLMResponse | None = None,
    ) -> Turn:
        """Return a new turn that extends the longest earlier turn of its temperature, if any.

        Its response is the record of the same generation in an earlier attempt: finished, to be
        continued, or `NOTHING` without a record.
        """
        self.generations += 1
        turn = Turn(
            response=NOTHING,
            temperature=sampling.temperature,
            num_truncated=sampling.num_truncated,
            origin=origin,
        )
        place(turn, input_ids, self.turns, extends)
        stored = self._recall(turn, sampling.max_new_tokens) if self.recorded else None
        if stored is None:
            turn.index = self.next_index
            self.next_index += 1
        else:
            turn.index = stored.index
            turn.response = stored.response
            turn.is_stored = stored.is_finished
            self.resumed_tokens += len(stored.response.output_ids)
        return turn

    def _recall(self, turn: Turn, max_new_tokens: int) -> StoredTurn | None:
        """Return the first unused record with the turn's prompt and temperature; None without one.

        An unfinished record with `max_new_tokens` tokens or more is dropped.
        """
        for stored in self.recorded:
            if stored.prompt == turn.prompt and stored.temperature == turn.temperature:
                self.recorded.remove(stored)
                num_tokens = len(stored.response.output_ids)
                if stored.is_finished or num_tokens < max_new_tokens:
                    return stored
                break
        self.resumed_diverged = 1
        return None

    def store_partial(self, turn: Turn, response: LLMResponse) -> None:
        """Keep the unfinished response of a turn."""
        self.partial[turn.index] = msgspec.structs.replace(turn, response=response)

    def add(self, turn: Turn, response: LLMResponse) -> None:
        """Add a turn of `begin` with its finished response."""
        turn.response = response
        turn.sampled = arrays(response)
        self.partial.pop(turn.index, None)
        self.turns.append(turn)
        if turn.parent is not None:
            turn.parent.json = b""
        if len(self.turns) > RECENT:
            oldest_recent = self.turns[-1 - RECENT]
            oldest_recent.json = b""

    def drop(self, response: LLMResponse) -> None:
        """Remove the turn of a response that never reached its client: it is not trained."""
        self.turns = [turn for turn in self.turns if turn.response is not response]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The seat of an agent in an episode. Filled by the collector."""

    name: str = "agent"
    group_id: str = "group"
    episode_id: str = "episode"
    min_version: int = 0
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    is_eval: bool = False
    """Whether the episode is not trained."""
    recorded: tuple[StoredTurn, ...] = ()
    """The seat's generations in an earlier attempt, whose worker crashed, by index."""


def finite(value: float | None, parts: dict[str, float]) -> tuple[float | None, dict[str, float]]:
    """Return a reward, which may be None, and its parts as floats.

    Raises:
        RewardNotFinite: a number or the sum is not finite.
    """
    value = None if value is None else float(value)
    parts = {name: float(part) for name, part in parts.items()}
    total = sum(parts.values(), value or 0.0)
    if not isfinite(total):
        raise RewardNotFinite(f"reward and parts must be finite, got {value}, {parts}")
    return value, parts
