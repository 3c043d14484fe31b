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
from arealite.api.server_protocol import GenerateRequest, ServerAnswer
from arealite.ext.self_check.difference_reasons import MARGINS, MIXTURE_MARGINS, Bound, bound_of

FLOOR = (1e-4, 1e-3)
"""Lowest bounds in float32, in nats: the mean of the row, and one token. Real servers differed by
1e-5 and 4e-5. In 16 bits, bounds come from the noise alone."""
NEAR_TIES = 4
"""Tokens of a mixture of experts that may differ: near ties, rounding decides about experts."""
CLOSER = 0.25
"""Scores are those of another version if they are nearer to these by this factor."""
SAME = 1e-6
"""Largest change of the scores of a server that still has the same weights."""
ALIGNED = 0.5
"""Smallest cosine of the difference and the last change of the weights, if one explains the
other."""
NUM_NEXT = 8
"""Most probable next tokens that are compared."""
NO_SCORES = "servers of this kind return no log-probabilities of prompts"


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
        if version is not None and str(answer.newest_version) != str(version):
            raise NotComparable(f"it answered under version {answer.newest_version}")
    if not scored.prompt_logprobs:
        raise NotComparable(NO_SCORES)
    return ServerScores(
        prompt_T=np.array(scored.prompt_logprobs, np.float64),
        fresh_K=np.array(scored.prompt_top_logprobs),
        cached_K=_next_logprobs(continued),
    )


def _next_logprobs(answer: ServerAnswer) -> np.ndarray:
    """Return the log-probabilities of the most probable next tokens, from the highest on [K]."""
    return np.array(answer.logprobs[:1])


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
        return replace(first, mean=min(mean, first.mean), token=min(token, first.token))

    def learn(self, errors: np.ndarray, expected_T: np.ndarray) -> None:
        """Note the differences of a proof as noise."""
        noise = errors / self._scale(expected_T)
        self._noise = noise if self._noise is None else np.maximum(self._noise, noise)

    def _scale(self, expected_T: np.ndarray) -> float:
        """Return the factor that noise is in proportion to."""
        return 1.0 if self.is_exact else max(float(expected_T.std()), FLOOR[0])

    def errors(self, scores_T: np.ndarray, expected_T: np.ndarray) -> np.ndarray:
        """Return the mean and the largest difference [2]; infinity for scores that are no number.

        The tokens that a mixture of experts may change are not counted.
        """
        if scores_T.shape != expected_T.shape or not np.isfinite(scores_T).all():
            return np.full(2, np.inf)
        ordered = np.sort(np.abs(scores_T - expected_T))
        counted = ordered[: max(1, len(ordered) - self._num_ignored)]
        return np.array([counted.mean(), counted[-1]])


def is_within(errors: np.ndarray, bound: Bound) -> bool:
    """Return whether differences [2] are within a bound."""
    mean, largest = errors
    return bool(mean <= bound.mean and largest <= bound.token)


def fault_of(
    scores: ServerScores,
    expected: Mapping[int, np.ndarray],
    version: int,
    *,
    tolerance: Tolerance,
    previous_T: np.ndarray | None,
    drops_caches: bool = True,
) -> str:
    """Return why a server does not generate from a version; "" if it does.

    Args:
        scores: Its answers.
        expected: The trainer's scores of this and other versions.
        version: The version that it reports.
        tolerance: The differences that are no fault.
        previous_T: Its own scores under the version before; None: unknown.
        drops_caches: Whether updates drop cached prefixes.
    """
    expected_T = expected[version]
    errors = tolerance.errors(scores.prompt_T, expected_T)
    mean, largest = errors
    differences = f"mean {mean:.2g}, largest {largest:.2g} nats"
    older = _version_of(scores, expected, version, tolerance)
    if older is not None:
        return (
            f"old weights: the scores equal version {older}'s, not version {version}'s "
            f"({differences})"
        )
    before_T = expected.get(version - 1)
    if before_T is not None and previous_T is not None:
        change, _ = tolerance.errors(before_T, expected_T)
        _, own_change = tolerance.errors(scores.prompt_T, previous_T)
        if own_change <= SAME and change > _visible(tolerance):
            return (
                f"old weights: the server's scores are those that it gave at version {version - 1},"
                f" and the trainer's changed by {change:.2g} nats"
            )
    bound = tolerance.bound(expected_T)
    if not is_within(errors, bound):
        reason = _reason(scores.prompt_T, expected, version, tolerance)
        allowed = f"{bound.mean:.2g} and {bound.token:.2g} are allowed"
        return f"{reason} ({differences}; {allowed})"
    num_common = min(len(scores.fresh_K), len(scores.cached_K))
    if not (num_common and drops_caches):
        return ""
    cached_mean, _ = tolerance.errors(scores.cached_K[:num_common], scores.fresh_K[:num_common])
    allowed_mean = bound.mean if tolerance.is_exact else bound.token
    if cached_mean > allowed_mean:
        return (
            f"stale prefix cache: after a cached prefix, the next token's log-probabilities differ "
            f"by {cached_mean:.2g} nats from those without cache"
        )
    return ""


def _visible(tolerance: Tolerance) -> float:
    """Return the change of the trainer's scores that new weights of a server must show."""
    mean_floor, token_floor = FLOOR
    return mean_floor if tolerance.is_exact else token_floor


def nearest(
    scores_T: np.ndarray, expected: Mapping[int, np.ndarray], tolerance: Tolerance
) -> tuple[int, np.ndarray]:
    """Return the version whose scores are nearest, and the differences from these."""
    errors_by_version = {
        version: tolerance.errors(scores_T, expected_T) for version, expected_T in expected.items()
    }
    version = min(errors_by_version, key=lambda version: float(errors_by_version[version][0]))
    return version, errors_by_version[version]


def _version_of(
    scores: ServerScores,
    expected: Mapping[int, np.ndarray],
    version: int,
    tolerance: Tolerance,
) -> int | None:
    """Return the other version that the scores belong to; None if there is none."""
    mean, _ = tolerance.errors(scores.prompt_T, expected[version])
    other, errors = nearest(scores.prompt_T, expected, tolerance)
    lowest = FLOOR[0] / 10 if tolerance.is_exact else FLOOR[1]
    is_other = other != version and mean > lowest and errors[0] < CLOSER * mean
    return other if is_other else None


def _reason(
    scores_T: np.ndarray,
    expected: Mapping[int, np.ndarray],
    version: int,
    tolerance: Tolerance,
) -> str:
    """Return the likely reason of scores that belong to no version."""
    expected_T = expected[version]
    if not np.isfinite(scores_T).all():
        return "its scores are no numbers: weights that are not finite"
    error_T = scores_T - expected_T
    first = min(expected)
    for other, kind in ((version - 1, "partial"), (first, "adapter")):
        if other not in expected or other == version:
            continue
        share = _cosine(error_T, expected[other] - expected_T)
        if share > ALIGNED:
            return (
                f"a part of the weights is old: the scores are between those of versions {other} "
                f"and {version}"
            )
        if share < -ALIGNED and kind == "adapter":
            return (
                f"the change since version {first} is applied more than once, as with a wrong "
                "scale of an adapter"
            )
    low = bound_of("bfloat16", None, temperature=1.0, is_mixture=False)
    if tolerance.is_exact and is_within(tolerance.errors(scores_T, expected_T), low):
        return "other dtype, or few wrong tensors: the differences are as small as those of 16 bits"
    return "other weights: the scores belong to no version of this run"


def _cosine(left_T: np.ndarray, right_T: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors; 0 if one is 0."""
    length = float(np.linalg.norm(left_T) * np.linalg.norm(right_T))
    return float(left_T @ right_T) / length if length else 0.0
