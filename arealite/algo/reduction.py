"""Loss weights of tokens, with which a plain sum is the required mean over the global minibatch.

A mean over each micro-batch would make the gradient depend on the division into micro-batches.
"""

from collections.abc import Sequence

from arealite.api.algorithm import Reduction
from arealite.base.errors import UserError


def token_weights(
    kind: Reduction,
    lengths: Sequence[int],
    *,
    divisor: float | None = None,
) -> list[float]:
    """Return the loss weight of the tokens of each row.

    token_mean: 1 / all tokens. seq_mean_token_mean: 1 / (rows · tokens of the row).
    seq_mean_token_sum: 1 / (rows · divisor) (Dr.GRPO, arXiv 2503.20783). Rows without loss tokens
    get 0 and do not count as rows.

    Args:
        kind: The reduction.
        lengths: Number of loss tokens of each row of the global minibatch, of all ranks.
        divisor: Constant of seq_mean_token_sum, for example max_new_tokens.

    Raises:
        UserError: `seq_mean_token_sum` without a positive divisor.
    """
    num_rows = sum(length > 0 for length in lengths)
    if kind == "token_mean":
        num_tokens = sum(lengths)
        return [1.0 / num_tokens if length > 0 else 0.0 for length in lengths]
    if kind == "seq_mean_token_mean":
        return [1.0 / (num_rows * length) if length > 0 else 0.0 for length in lengths]
    if divisor is None or divisor <= 0:
        raise UserError("seq_mean_token_sum needs a divisor above 0 (max_new_tokens).")
    row_weight = 1.0 / (num_rows * divisor) if num_rows else 0.0
    return [row_weight if length > 0 else 0.0 for length in lengths]
