"""A sampler that answers with given texts in random token splits, and a log of every token.

`ScriptedTokens` is an LLM client. It writes each answer as random tokens that decode to the
answer's text: seldom the tokens of the tokenizer, often halves of UTF-8 characters. Weights are
published in the middle of answers. `check` compares trajectories with the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from arealite.api.llm import LLMClient, LLMRequest, LLMResponse
from arealite.api.trajectory import Segment

LONGEST = 12
"""Longest token that `Splitter` uses, in bytes."""


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter in the vocabulary of a byte-level tokenizer."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = {chr(byte): byte for byte in kept}
    return letters | {chr(256 + index): byte for index, byte in enumerate(moved)}


class Splitter:
    """Splits texts into random tokens of a byte-level tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.added: dict[str, int] = tokenizer.get_added_vocab()
        letters = _byte_of_letter()
        self.ids: dict[bytes, int] = {}
        for piece, token in tokenizer.get_vocab().items():
            if piece not in self.added and all(letter in letters for letter in piece):
                self.ids[bytes(letters[letter] for letter in piece)] = token
        names = sorted(self.added, key=len, reverse=True)
        self.markers = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self.longest = min(LONGEST, max(map(len, self.ids)))

    def split(self, text: str, rng: random.Random) -> list[int]:
        """Return random tokens whose text is `text`. Added tokens keep their own ids."""
        ids: list[int] = []
        for part in self.markers.split(text):
            marker = self.added.get(part)
            ids += self.plain(part, rng) if marker is None else [marker]
        return ids

    def plain(self, text: str, rng: random.Random) -> list[int]:
        """Return random tokens of a text without special tokens."""
        data, at, ids = text.encode(), 0, list[int]()
        while at < len(data):
            found = [
                size
                for size in range(1, self.longest + 1)
                if at + size <= len(data) and data[at : at + size] in self.ids
            ]
            size = rng.choice(found)
            ids.append(self.ids[data[at : at + size]])
            at += size
        return ids


@dataclass(frozen=True)
class Sampled:
    """One generation in the sampler's log."""

    request_id: str
    prompt: bytes
    """`digest` of the prompt's token ids."""
    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    temperature: float


Script = Callable[[LLMRequest, random.Random], str]
"""Returns the text of an answer, including the special token that ends it."""


class ScriptedTokens(LLMClient):
    """Answers each request with the text of `script` in random tokens.

    Args:
        tokenizer: A byte-level tokenizer.
        script: Writes the answers.
        seed: Seed of texts, splits, log-probabilities and publications.
        publish: Probability of a publication of weights before a token.
        pause: Awaited before each piece of tokens; None: the event loop runs once.
    """

    def __init__(
        self,
        tokenizer: Any,
        script: Script,
        *,
        seed: int = 0,
        publish: float = 0.02,
        pause: Callable[[LLMRequest], Any] | None = None,
    ) -> None:
        self.splitter, self.script = Splitter(tokenizer), script
        self.tokenizer, self.seed, self.publish, self.pause = tokenizer, seed, publish, pause
        self.log: list[Sampled] = []
        """Every finished generation, in the order of their ends."""
        self.version = 1
        self.requests = 0
        self.interruptions = 0

    async def generate(self, request: LLMRequest) -> LLMResponse:
        """Sample an answer, token by token; stop like a server does."""
        self.requests += 1
        rng = random.Random(f"{self.seed}/{self.requests}/{request.request_id}")
        planned = self.splitter.split(self.script(request, rng), rng)
        before = request.resumed
        ids = list(before.output_ids) if before else []
        logprobs = list(before.logprobs) if before else []
        versions = list(before.versions) if before else []
        interruptions, told, reason = before.interruptions if before else 0, len(ids), ""
        for token in planned[len(ids) :]:
            if told < len(ids) and rng.random() < 0.3:
                told = await self._tell(request, ids, told)
            if ids and rng.random() < self.publish:
                self.version += 1
                interruptions += 1
                if request.on_partial:
                    request.on_partial(
                        LLMResponse(
                            output_ids=[*ids],
                            logprobs=[*logprobs],
                            versions=[*versions],
                            stop_reason="",
                            interruptions=1,
                        )
                    )
            ids.append(token)
            logprobs.append(_float32(-5 * rng.random()))
            versions.append(self.version)
            if reason := self._end(request, ids):
                break
        await self._tell(request, ids, told)
        self.interruptions += interruptions
        sampled = (request.request_id, digest(request.input_ids), [*ids], [*logprobs], [*versions])
        self.log.append(Sampled(*sampled, request.sampling.temperature))
        return LLMResponse(
            output_ids=ids,
            logprobs=logprobs,
            versions=versions,
            stop_reason=reason or "stop",
            interruptions=interruptions,
        )

    async def _tell(self, request: LLMRequest, ids: list[int], told: int) -> int:
        """Pass new tokens to the request; return the number of tokens passed so far."""
        await (self.pause(request) if self.pause else asyncio.sleep(0))
        if request.on_tokens and told < len(ids):
            request.on_tokens(ids[told:])
        return len(ids)

    def _end(self, request: LLMRequest, ids: list[int]) -> str:
        sampling = request.sampling
        if ids[-1] in sampling.stop_token_ids:
            return "stop"
        tail = self.tokenizer.decode(ids[-64:]) if sampling.stop else ""
        if any(stop in tail for stop in sampling.stop):
            return "stop"
        return "length" if len(ids) >= sampling.max_new_tokens else ""


def digest(ids: list[int]) -> bytes:
    """Return a hash of token ids."""
    return hashlib.sha256(array("i", ids)).digest()


def _float32(value: float) -> float:
    return array("f", [value])[0]


@dataclass
class Verdict:
    """The comparison of trajectories with the log of a sampler."""

    tokens: int = 0
    """Sampled tokens in the log."""
    trained: int = 0
    """Tokens with loss mask 1."""
    rows: int = 0
    """Segments."""
    wrong_tokens: int = 0
    """Trained tokens that were not sampled under the prefix that the segment has."""
    wrong_logprobs: int = 0
    wrong_versions: int = 0
    wrong_temperatures: int = 0
    lost: int = 0
    """Generations that are not trained."""
    doubled: int = 0
    """Generations that are trained more than once."""
    details: list[str] = field(default_factory=list[str])

    @property
    def wrong(self) -> int:
        """Number of tokens with any error."""
        return (
            self.wrong_tokens + self.wrong_logprobs + self.wrong_versions + self.wrong_temperatures
        )

    def add(self, other: Verdict) -> None:
        """Add the counts of another comparison."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def check(
    log: Iterable[Sampled], segments: Iterable[Segment], *, dropped: Iterable[str] = ()
) -> Verdict:
    """Compare the segments of trajectories with the log of their sampler.

    Args:
        log: Every generation of the sessions.
        segments: Every segment of the sessions.
        dropped: Request ids of generations that must not be trained.
    """
    verdict, absent = Verdict(), set(dropped)
    known: defaultdict[bytes, list[Sampled]] = defaultdict(list)
    for sampled in log:
        if sampled.output_ids:
            known[sampled.prompt].append(sampled)
            verdict.tokens += len(sampled.output_ids)
    used: Counter[str] = Counter()
    for number, segment in enumerate(segments):
        verdict.rows += 1
        tokens = array("i", segment.tokens).tolist()
        verdict.trained += sum(segment.loss_mask)
        for begin, end in _spans(segment.loss_mask):
            _check_span(verdict, known, used, segment, tokens, begin, end, f"segment {number}")
    for entries in known.values():
        for sampled in entries:
            expected = sampled.request_id not in absent
            count = used[sampled.request_id]
            verdict.lost += expected and not count
            verdict.doubled += max(0, count - expected)
            if count != expected:
                verdict.details.append(f"{sampled.request_id} is trained {count} times")
    return verdict


def _spans(mask: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of trained tokens."""
    at = mask.find(1)
    while at >= 0:
        end = mask.find(0, at)
        yield at, len(mask) if end < 0 else end
        at = mask.find(1, end) if end >= 0 else -1


def _check_span(
    verdict: Verdict,
    known: dict[bytes, list[Sampled]],
    used: Counter[str],
    segment: Segment,
    tokens: list[int],
    begin: int,
    end: int,
    where: str,
) -> None:
    """Compare one run of trained tokens: one generation, or several without a gap."""
    logprobs, versions = array("f", segment.logprobs), array("i", segment.versions)
    while begin < end:
        found = [
            each
            for each in known.get(digest(tokens[:begin]), ())
            if begin + len(each.output_ids) <= end
            and each.output_ids == tokens[begin : begin + len(each.output_ids)]
        ]
        if not found:
            verdict.wrong_tokens += end - begin
            verdict.details.append(f"{where}: tokens {begin} to {end} were not sampled there")
            return
        size = max(len(each.output_ids) for each in found)
        found = [each for each in found if len(each.output_ids) == size]

        def errors(each: Sampled, begin: int = begin, size: int = size) -> tuple[int, int, int]:
            """Return wrong log-probabilities, wrong versions, and earlier uses."""
            pairs = zip(each.logprobs, logprobs[begin : begin + size], strict=True)
            dated = zip(each.versions, versions[begin : begin + size], strict=True)
            wrong = sum(a != b for a, b in pairs), sum(a != b for a, b in dated)
            return *wrong, used[each.request_id]

        best = min(found, key=errors)
        wrong_logprobs, wrong_versions, _ = errors(best)
        verdict.wrong_logprobs += wrong_logprobs
        verdict.wrong_versions += wrong_versions
        verdict.wrong_temperatures += size * (best.temperature != segment.temperature)
        used[best.request_id] += 1
        begin += size
