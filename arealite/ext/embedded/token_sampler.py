"""Draws one token for each row of a batch, with its log-probability as SGLang defines it.

Rows may have different settings, because a batch mixes agents; the code is vectorised over rows. A
setting that no row uses is not computed.

SGLang's log-probabilities are those of the whole vocabulary, also if top_p, top_k or min_p cut the
distribution. A row that asks for the most probable tokens gets those of the cut distribution
instead, for the drawn token, too: the exact probabilities with which tokens are drawn.

Shape letters: B = rows, V = vocabulary, K = blocks of it, W = tokens of a block, N = alternatives,
F = rows that cut the distribution, M = most probable tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from arealite.ext.embedded.generation import Generation, SamplingParams

GREEDY_BELOW = 1e-6
"""Temperature below which the most probable token is taken."""
Top = tuple[Tensor, Tensor]
"""Ids and log-probabilities [B, M] of the most probable tokens, by falling probability; -inf: the
token cannot be drawn."""
BLOCK = 256
"""Tokens of a block; the first random number draws a block, the second a token in it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sampling settings of a batch, as tensors; None if no row uses the setting."""

    temperature_B1: Tensor
    """1 for greedy rows: their log-probabilities are raw."""
    greedy_B: Tensor | None
    all_greedy: bool
    cut: "CutRows | None"
    seeded: list[tuple[int, Generation]]
    """Row and request of those with a `sampling_seed`."""
    num_top: int
    """Largest number of most probable tokens that a row asks for."""


class CutRows(NamedTuple):
    """The rows that cut the distribution."""

    rows_F: Tensor
    top_k_F1: Tensor
    top_p_F1: Tensor
    min_p_F1: Tensor
    is_exact_F1: Tensor
    """Whether the row asks for the most probable tokens, and thus for exact log-probabilities."""


def settings_of(
    generations: Sequence[Generation],
    *,
    vocab_size: int,
    device: str,
) -> Settings:
    """Gather the settings of a batch of generations."""

    def column(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, device=device)[:, None]

    params = [generation.sampling for generation in generations]
    is_greedy = [row_params.temperature < GREEDY_BELOW for row_params in params]
    temperatures = [
        1.0 if row_is_greedy else row_params.temperature
        for row_is_greedy, row_params in zip(is_greedy, params, strict=True)
    ]
    cutting_rows = [
        row
        for row, row_params in enumerate(params)
        if not is_greedy[row] and _cuts(row_params, vocab_size)
    ]
    cut = None
    if cutting_rows:
        top_k = [params[row].top_k for row in cutting_rows]
        cut = CutRows(
            rows_F=torch.tensor(cutting_rows, device=device),
            top_k_F1=column([k if k > 0 else vocab_size for k in top_k]),
            top_p_F1=column([params[row].top_p for row in cutting_rows]),
            min_p_F1=column([params[row].min_p for row in cutting_rows]),
            is_exact_F1=column([generations[row].num_top > 0 for row in cutting_rows]),
        )
    return Settings(
        temperature_B1=column(temperatures),
        greedy_B=torch.tensor(is_greedy, device=device) if any(is_greedy) else None,
        all_greedy=all(is_greedy),
        cut=cut,
        seeded=[
            (row, generation)
            for row, generation in enumerate(generations)
            if generation.sampling.sampling_seed is not None
        ],
        num_top=max(generation.num_top for generation in generations),
    )


def _cuts(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether top_p, top_k or min_p excludes tokens."""
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size or params.min_p > 0.0


def ban_stops(logits_BV: Tensor, generations: Sequence[Generation]) -> None:
    """Forbid stop tokens, in place, in rows that have not reached their `min_new_tokens`."""
    banned_rows = list[int]()
    banned_tokens = list[int]()
    for row, generation in enumerate(generations):
        if len(generation.output) < generation.sampling.min_new_tokens:
            banned_rows += [row] * len(generation.stops)
            banned_tokens += generation.stops
    if banned_rows:  # in one write, because 256 writes take a millisecond
        logits_BV[banned_rows, banned_tokens] = -torch.inf


def draw(
    logits_BV: Tensor,
    settings: Settings,
    generator: Generator,
) -> tuple[Tensor, Tensor, Top | None]:
    """Return tokens [B], their log_softmax(logits / T) [B], float32, and the most probable tokens.

    Float32 logits are overwritten: on a CPU, each copy of them takes a thirtieth of a decode step.
    """
    best_B = None if settings.greedy_B is None else logits_BV.argmax(-1)
    scores_BV = logits_BV.float().div_(settings.temperature_B1)
    highest_B1 = scores_BV.amax(-1, keepdim=True)
    weights_BV = scores_BV.sub_(highest_B1).exp_()
    blocks_BKW = _blocks(weights_BV)
    sums_BK = blocks_BKW.sum(-1)
    total_B1 = sums_BK.sum(-1, keepdim=True)
    cut = settings.cut
    if cut is not None:
        rows_F = cut.rows_F
        total_F1 = total_B1[rows_F]
        kept_FKW = _blocks(_cut(weights_BV[rows_F], cut, total_F1))
        blocks_BKW[rows_F] = kept_FKW
        sums_BK[rows_F] = kept_FKW.sum(-1)
        kept_total_F1 = sums_BK[rows_F].sum(-1, keepdim=True)
        total_B1[rows_F] = torch.where(cut.is_exact_F1, kept_total_F1, total_F1)
    if best_B is not None and settings.all_greedy:
        tokens_B = best_B
    else:
        random_2B1 = _random_numbers(sums_BK, settings.seeded, generator)
        tokens_B = _draw_token(blocks_BKW, sums_BK, random_2B1)
        tokens_B = tokens_B.clamp(max=logits_BV.shape[-1] - 1)
        if best_B is not None and settings.greedy_B is not None:
            tokens_B = torch.where(settings.greedy_B, best_B, tokens_B)
    probs_B1 = weights_BV.gather(-1, tokens_B[:, None]) / total_B1
    top = None
    if settings.num_top:
        top_weights_BM, top_ids_BM = blocks_BKW.flatten(1).topk(settings.num_top)
        top_logprobs_BM = (top_weights_BM / total_B1).log_()
        top = (top_ids_BM, top_logprobs_BM)
    return tokens_B, probs_B1.log_()[:, 0], top


def _blocks(weights_BV: Tensor) -> Tensor:
    """Return weights as blocks of the vocabulary [B, blocks, BLOCK]; the last is padded with 0."""
    num_missing = -weights_BV.shape[-1] % BLOCK
    if num_missing:
        weights_BV = pad(weights_BV, (0, num_missing))
    return weights_BV.unflatten(-1, (-1, BLOCK))


def _random_numbers(
    sums_BK: Tensor,
    seeded: Sequence[tuple[int, Generation]],
    generator: Generator,
) -> Tensor:
    """Return two random numbers in [0, 1) for each row [2, B, 1], float64.

    With a seed they depend only on seed and position, as with SGLang's `sampling_seed`.
    """
    num_rows = len(sums_BK)
    random_2B1 = sums_BK.new_empty((2, num_rows, 1), dtype=torch.float64)
    random_2B1.uniform_(generator=generator)
    for row, generation in seeded:
        position = generation.length_so_far()
        source = random.Random(f"{generation.sampling.sampling_seed}:{position}")
        random_2B1[0, row] = source.random()
        random_2B1[1, row] = source.random()
    return random_2B1


def _draw_token(blocks_BKW: Tensor, sums_BK: Tensor, random_2B1: Tensor) -> Tensor:
    """Draw a token [B] for each row: first a block of the vocabulary, then a token of the block.

    One random number for each token, as in torch.multinomial, would take a sixth of a decode step
    on a CPU with 49,152 tokens. If a weight is NaN, the token may be beyond the vocabulary.
    """
    block_B = _draw_index(sums_BK, random_2B1[0])
    rows_B = torch.arange(len(block_B), device=block_B.device)
    weights_BW = blocks_BKW[rows_B, block_B]
    return block_B * BLOCK + _draw_index(weights_BW, random_2B1[1])


def _draw_index(weights_BN: Tensor, random_B1: Tensor) -> Tensor:
    """Draw an index [B] for each row with probabilities proportional to its weights.

    It needs no host synchronisation, and never takes an index of weight 0.
    """
    sums_BN = weights_BN.double().cumsum(-1)
    total_B1 = sums_BN[:, -1:]
    point_B1 = total_B1 * (1.0 - random_B1)  # in (0, total]
    index_B = torch.searchsorted(sums_BN, point_B1)[:, 0]
    return index_B.clamp(max=weights_BN.shape[-1] - 1)


def _cut(weights_FV: Tensor, cut: CutRows, total_F1: Tensor) -> Tensor:
    """Zero the tokens outside top_k, top_p and min_p.

    The weights of a row add up to `total_F1`, and the largest is 1.
    """
    ordered_FV, order_FV = weights_FV.sort(-1, descending=True)
    mass_before_FV = ordered_FV.cumsum(-1) - ordered_FV
    rank_V = torch.arange(weights_FV.shape[-1], device=weights_FV.device)
    is_cut_FV = (rank_V >= cut.top_k_F1) | (mass_before_FV > cut.top_p_F1 * total_F1)
    is_cut_FV |= ordered_FV < cut.min_p_F1
    kept_FV = ordered_FV.masked_fill(is_cut_FV, 0.0)
    return torch.zeros_like(weights_FV).scatter_(-1, order_FV, kept_FV)
