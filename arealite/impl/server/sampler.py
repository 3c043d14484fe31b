"""Draws one token for each row of a batch, with its log-probability as SGLang defines it.

Rows may have different settings, because a batch mixes agents; the code is vectorised over rows. A
setting that no row uses is not computed.

Shape letters: B = rows, V = vocabulary, K = blocks of it, W = tokens of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from arealite.impl.server.generation import Generation

GREEDY_BELOW = 1e-6
BLOCK = 256
"""Tokens of a block; the first random number draws a block, the second a token in it."""


@dataclass(frozen=True)
class Settings:
    """Sampling settings of a batch, as tensors; None if no row uses the setting."""

    temperature_B1: Tensor
    """1 for greedy rows: their log-probabilities are raw."""
    greedy_B: Tensor | None
    all_greedy: bool
    filtered: tuple[Tensor, Tensor, Tensor] | None
    """(rows, top_k, top_p) of the rows that cut the distribution."""


def settings_of(generations: Sequence[Generation], *, vocab_size: int, device: str) -> Settings:
    """Gather the settings of a batch of generations."""
    wanted = [generation.sampling for generation in generations]
    greedy = [s.temperature < GREEDY_BELOW for s in wanted]
    temperatures = [1.0 if g else s.temperature for g, s in zip(greedy, wanted, strict=True)]
    cut = [
        (row, s.top_k if s.top_k > 0 else vocab_size, s.top_p)
        for row, s in enumerate(wanted)
        if not greedy[row] and (s.top_p < 1.0 or 0 < s.top_k < vocab_size)
    ]
    filtered = None
    if cut:
        rows, top_k, top_p = (torch.tensor(c, device=device) for c in zip(*cut, strict=True))
        filtered = (rows, top_k[:, None], top_p[:, None])
    return Settings(
        temperature_B1=torch.tensor(temperatures, device=device)[:, None],
        greedy_B=torch.tensor(greedy, device=device) if any(greedy) else None,
        all_greedy=all(greedy),
        filtered=filtered,
    )


def ban_stops(logits_BV: Tensor, generations: Sequence[Generation]) -> None:
    """Forbid stop tokens, in place, in rows that have not reached their `min_new_tokens`."""
    banned = [
        (row, stop)
        for row, generation in enumerate(generations)
        if len(generation.output) < generation.sampling.min_new_tokens
        for stop in generation.stops
    ]
    if banned:  # in one write, because 256 writes take a millisecond
        logits_BV[tuple(zip(*banned, strict=True))] = -torch.inf


def draw(logits_BV: Tensor, settings: Settings, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return tokens [B] and their log_softmax(logits / T) [B], float32.

    Log-probabilities are not renormalised after top_k and top_p (as SGLang's). Float32 logits are
    overwritten: on a CPU, each copy of them takes a thirtieth of a decode step.
    """
    best_B = None if settings.greedy_B is None else logits_BV.argmax(-1)
    scores_BV = logits_BV.float().div_(settings.temperature_B1)
    weights_BV = scores_BV.sub_(scores_BV.amax(-1, keepdim=True)).exp_()
    blocks_BKW = _blocks(weights_BV)
    sums_BK = blocks_BKW.sum(-1)
    total_B1 = sums_BK.sum(-1, keepdim=True)
    if settings.filtered is not None:
        rows, top_k, top_p = settings.filtered
        kept = _blocks(_cut(weights_BV[rows], top_k, top_p * total_B1[rows]))
        blocks_BKW[rows] = kept
        sums_BK[rows] = kept.sum(-1)
    if best_B is not None and settings.all_greedy:
        tokens_B = best_B
    else:
        tokens_B = _draw_token(blocks_BKW, sums_BK, generator).clamp(max=logits_BV.shape[-1] - 1)
        if best_B is not None and settings.greedy_B is not None:
            tokens_B = torch.where(settings.greedy_B, best_B, tokens_B)
    return tokens_B, (weights_BV.gather(-1, tokens_B[:, None]) / total_B1).log_()[:, 0]


def _blocks(weights_BV: Tensor) -> Tensor:
    """Return weights as blocks of the vocabulary [B, blocks, BLOCK]; the last is padded with 0."""
    missing = -weights_BV.shape[-1] % BLOCK
    return (pad(weights_BV, (0, missing)) if missing else weights_BV).unflatten(-1, (-1, BLOCK))


def _draw_token(blocks_BKW: Tensor, sums_BK: Tensor, generator: Generator) -> Tensor:
    """Draw a token [B] for each row: first a block of the vocabulary, then a token of the block.

    One random number for each token, as in torch.multinomial, would take a sixth of a decode step
    on a CPU with 49,152 tokens. If a weight is NaN, the token may be beyond the vocabulary.
    """
    block_B = _draw_index(sums_BK, generator)
    rows_B = torch.arange(len(block_B), device=block_B.device)
    return block_B * BLOCK + _draw_index(blocks_BKW[rows_B, block_B], generator)


def _draw_index(weights_BN: Tensor, generator: Generator) -> Tensor:
    """Draw an index [B] for each row with probabilities proportional to its weights.

    It needs no host synchronisation, and never takes an index of weight 0.
    """
    sums_BN = weights_BN.double().cumsum(-1)
    total_B1 = sums_BN[:, -1:]
    random_B1 = torch.empty_like(total_B1).uniform_(generator=generator)  # in [0, 1)
    point_B1 = total_B1 * (1.0 - random_B1)  # in (0, total]
    index_B = torch.searchsorted(sums_BN, point_B1)[:, 0]
    return index_B.clamp(max=weights_BN.shape[-1] - 1)


def _cut(weights_BV: Tensor, top_k_B1: Tensor, mass_B1: Tensor) -> Tensor:
    """Zero the tokens outside the `top_k` with the largest weights, and outside the mass."""
    ordered, order = weights_BV.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(weights_BV.shape[-1], device=weights_BV.device)
    kept = ordered.masked_fill((rank >= top_k_B1) | (before > mass_B1), 0.0)
    return torch.zeros_like(weights_BV).scatter_(-1, order, kept)
