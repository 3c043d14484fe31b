"""Compares the scores of a server with those of the trainer, and finds the reason of a difference.

Scores are the log-probabilities of a fixed row of tokens. A server is asked twice: to score the row
anew, and to continue it as any request, with its cached prefixes.

Shape letters: T = tokens of the row but the first one, K = most probable next tokens.
"""

import uuid
from asyncio import gather
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from arealite.api.llm import SamplingConfig
from arealite.api.publisher import Generate
from arealite.api.server_protocol import GenerateRequest, TopRow, version_text
from arealite.ext.self_check.difference_reasons import (
    MARGINS,
    MIXTURE_MARGINS,
    Bound,
    bound_of,
)

FLOOR = (1e-4, 1e-3)
"""Lowest bounds in float32, in nats: the mean of the row, and one token. Real servers differed by
1e-5 and 4e-5. In 16 bits, bounds come from the noise alone."""
NEAR_TIES = 4
"""Tokens of a mixture of experts that may differ: near ties, rounding decides about experts."""
CLOSER = 0.25
"""Scores are those of another version if they are nearer to these by this factor."""
SAME = 1e-6
"""Largest change of the scores of a server that still has the same weights."""
VISIBLE = 0.25
"""In 16 bits, the trainer's scores must have changed by this share of the difference before a
server whose scores did not change has old weights. In 3 of 2,500 publishes of tiny models, a change
of 0.05 to 0.08 of the difference was rounded away at the server."""
HIDDEN = 0.5
"""Share of the bound below which old weights of a mixture of experts cannot be told in 16 bits. In
3 of 2,500 publishes of tiny models, they seemed to be old at 0.05 to 0.32 of it."""
ALIGNED = 0.5
"""Smallest cosine of the difference and the last change of the weights, if one explains the
other."""
NUM_NEXT = 8
"""Most probable next tokens that are compared."""
NO_SCORES = "servers of this kind return no log-probabilities of prompts"


ScoresByVersion = Mapping[int, np.ndarray]
"""The trainer's scores by version [T]."""


class NotComparable(Exception):
    """The server did not answer under the version, or returns no scores. The text says why."""


@dataclass(frozen=True, kw_only=True)
class ServerScores:
    """The answers of a server under one version."""

    prompt_T: np.ndarray
    fresh_K: np.ndarray
    """Log-probabilities of the most probable last tokens, from the highest on, without cache."""
    cached_K: np.ndarray
    """The same after a cached prefix; perhaps fewer."""


async def read_scores(generate: Generate, row: list[int], version: int | None) -> ServerScores:
    """Ask a server for its scores.

    Args:
        generate: Sends a request to it.
        row: The tokens.
        version: The version that its answers must have; None: any.

    Raises:
        NotComparable: It returns no scores, or answered under another version.
        RoleError, OSError: It cannot be asked.
    """
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=1)
    score_request = GenerateRequest(
        rid=f"canary-{uuid.uuid4().hex}~",
        input_ids=row,
        sampling=sampling,
        ignore_eos=True,
        num_top=NUM_NEXT,
        scores_prompt=True,
    )
    next_request = replace(
        score_request,
        rid=f"canary-{uuid.uuid4().hex}~",
        input_ids=row[:-1],
        scores_prompt=False,
    )
    scored, continued = await gather(generate(score_request), generate(next_request))
    for answer in (scored, continued):
        if not answer.output_ids:
            raise NotComparable("an update or another client has aborted the request")
        if version is not None and version_text(answer.newest_version) != str(version):
            raise NotComparable(f"it answered under version {answer.newest_version}")
    if not scored.prompt_logprobs:
        raise NotComparable(NO_SCORES)
    sampled: TopRow = [(continued.logprobs[0], continued.output_ids[0], None)]
    return ServerScores(
        prompt_T=np.array(scored.prompt_logprobs, np.float64),
        fresh_K=_highest(scored.prompt_top_tokens[-1:]),
        cached_K=_highest((continued.top_tokens or [sampled])[:1]),
    )


def _highest(rows: list[TopRow]) -> np.ndarray:
    """Return the log-probabilities of at most NUM_NEXT tokens, from the highest on [K]."""
    logprobs = [logprob for row in rows for logprob, _, _ in row if logprob is not None]
    return np.sort(logprobs)[::-1][:NUM_NEXT]


class Tolerance:
    """The differences between the trainer and one server that are no fault.

    At first it is the bound of the self-check for a model whose noise is unknown. After the first
    proof, it is a multiple of the noise so far. In 16 bits, noise grows with the spread of scores.
    """

    def __init__(self, dtype: str, *, is_mixture: bool) -> None:
        """Start without measured noise.

        Args:
            dtype: The coarser dtype of trainer and server.
            is_mixture: Whether the model has experts.
        """
        self._first_bound = bound_of(dtype, None, temperature=1.0, is_mixture=is_mixture)
        self._margins = MIXTURE_MARGINS if is_mixture else MARGINS
        self._is_mixture = is_mixture
        self._num_ignored = NEAR_TIES if is_mixture else 0
        self._noise: np.ndarray | None = None
        """The mean and the largest difference of all proofs, in units of `_scale` [2]."""
        self.is_exact = dtype == "float32"
        """Whether trainer and server compute in float32."""

    def bound(self, expected_T: np.ndarray) -> Bound:
        """Return the bound for a version."""
        first = self._first_bound
        if self._noise is None:
            return first
        limits = self._noise * self._margins * self._scale(expected_T)
        if self.is_exact:
            limits = np.maximum(limits, FLOOR)
        mean, token = limits.tolist()
        return replace(
            first,
            mean=min(mean, first.mean),
            token=min(token, first.token),
        )

    def learn(self, errors: np.ndarray, expected_T: np.ndarray) -> None:
        """Note the differences of a proof as noise."""
        noise = errors / self._scale(expected_T)
        self._noise = noise if self._noise is None else np.maximum(self._noise, noise)

    def hides_old_weights(self, mean: float, expected_T: np.ndarray) -> bool:
        """Return whether rounding alone may explain scores that seem to be old.

        In 16 bits, near ties, rounding decides which experts compute a token. An update may move
        the trainer to another expert and the server not, whose scores then seem to be old.
        """
        if self.is_exact or not self._is_mixture:
            return False
        return mean <= HIDDEN * self.bound(expected_T).mean

    def _scale(self, expected_T: np.ndarray) -> float:
        """Return the factor that noise is in proportion to."""
        return 1.0 if self.is_exact else max(float(expected_T.std()), FLOOR[0])

    def errors(self, scores_T: np.ndarray, expected_T: np.ndarray) -> np.ndarray:
        """Return the mean and the largest difference [2]; infinity for scores that are no number.

        The tokens that a mixture of experts may change are not counted.
        """
        differences = np.nan_to_num(np.abs(scores_T - expected_T), nan=np.inf)
        num_counted = max(1, len(differences) - self._num_ignored)
        counted = np.sort(differences)[:num_counted]
        return np.array([counted.mean(), counted[-1]])

    def nearest(self, scores_T: np.ndarray, expected: ScoresByVersion) -> tuple[int, np.ndarray]:
        """Return the version whose scores are nearest, and the differences from these [2]."""
        errors = {version: self.errors(scores_T, expected[version]) for version in expected}
        version = min(errors, key=lambda version: errors[version][0])
        return version, errors[version]


def is_within(errors: np.ndarray, bound: Bound) -> bool:
    """Return whether differences [2] are within a bound."""
    mean, largest = errors
    return bool(mean <= bound.mean and largest <= bound.token)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The scores of a server under a version, and what they are compared with."""

    version: int
    scores: ServerScores
    expected: ScoresByVersion
    """The trainer's scores of this version, of the first one and of others."""
    tolerance: Tolerance
    previous_version: int
    """An earlier version that the server was proven to have; -1: none."""
    previous_T: np.ndarray
    """The server's own scores under that version."""
    drops_caches: bool
    """Whether updates drop cached prefixes."""

    @property
    def errors(self) -> np.ndarray:
        """The mean and the largest difference [2]."""
        return self.tolerance.errors(self.scores.prompt_T, self.expected[self.version])

    def fault(self) -> str:
        """Return why the server does not generate from the version; "" if it does."""
        mean, largest = self.errors
        bound = self.tolerance.bound(self.expected[self.version])
        reason = self._old_weights()
        if not reason and not is_within(self.errors, bound):
            reason = self._likely_reason()
        if reason:
            allowed = f"{bound.mean:.2g} and {bound.token:.2g} are allowed"
            return f"{reason} (mean {mean:.2g}, largest {largest:.2g} nats; {allowed})"
        return self._stale_cache(bound.mean if self.tolerance.is_exact else bound.token)

    def _old_weights(self) -> str:
        """Return which older weights the server has; "" if none is known."""
        tolerance = self.tolerance
        scores_T = self.scores.prompt_T
        mean, _ = self.errors
        if tolerance.hides_old_weights(mean, self.expected[self.version]):
            return ""
        other, other_errors = tolerance.nearest(scores_T, self.expected)
        visible = FLOOR[0] if tolerance.is_exact else FLOOR[1]
        if mean > visible / 10 and other_errors[0] < CLOSER * mean:
            return f"old weights: the scores equal version {other}'s"
        before_T = self.expected.get(self.previous_version)
        if before_T is None or not self.is_unchanged():
            return ""
        change, _ = tolerance.errors(before_T, self.expected[self.version])
        if not tolerance.is_exact:
            visible = max(visible, VISIBLE * mean)
        if change > visible:
            return f"old weights: the scores did not change, and the trainer's did by {change:.2g}"
        return ""

    def is_unchanged(self) -> bool:
        """Return whether the server has the same scores as under the earlier version."""
        if self.previous_T.shape != self.scores.prompt_T.shape:
            return False
        _, own_change = self.tolerance.errors(self.scores.prompt_T, self.previous_T)
        return bool(own_change <= SAME)

    def _likely_reason(self) -> str:
        """Return the likely reason of scores that belong to no version."""
        first = min(self.expected)
        to_first = self._alignment(first)
        to_previous = self._alignment(self.version - 1)
        if max(to_first, to_previous) > ALIGNED:
            return "a part of the weights is old: the scores are between those of two versions"
        if to_first < -ALIGNED:
            return (
                f"the change since version {first} is applied more than once, "
                "as with a wrong scale of an adapter"
            )
        low = bound_of("bfloat16", None, temperature=1.0, is_mixture=False)
        if self.tolerance.is_exact and is_within(self.errors, low):
            return "other dtype, or few wrong tensors: the scores differ as in 16 bits"
        return "other weights: the scores belong to no version of this run"

    def _alignment(self, other: int) -> float:
        """Return the cosine of the difference and the way to another version; 0 if unknown."""
        expected_T = self.expected[self.version]
        error_T = self.scores.prompt_T - expected_T
        way_T = self.expected.get(other, expected_T) - expected_T
        lengths = np.linalg.norm([error_T, way_T], axis=1)
        product = float(lengths.prod())
        return float(error_T @ way_T) / product if product else 0.0

    def _stale_cache(self, allowed: float) -> str:
        """Return how far a cached prefix changes the next token; "" if not more than allowed."""
        scores = self.scores
        num_common = min(len(scores.fresh_K), len(scores.cached_K))
        if not (num_common and self.drops_caches):
            return ""
        mean, _ = self.tolerance.errors(
            scores.cached_K[:num_common],
            scores.fresh_K[:num_common],
        )
        if mean <= allowed:
            return ""
        return f"stale prefix cache: it changes the next token by {mean:.2g} nats"
