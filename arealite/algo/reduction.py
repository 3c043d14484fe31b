"""Per-token loss weights that make a plain sum the wanted mean over the global minibatch.

Here because a mean inside a micro-batch would make the gradient depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from arealite.api.algorithm import Reduction
from arealite.base.errors import UserError


def token_weights(
    kind: Reduction, lengths: Sequence[int], *, divisor: float | None = None
) -> list[float]:
    """Return for each row of the global minibatch the weight of each of its loss tokens.

    `lengths` are loss-token counts of ALL rows of all ranks; rows without loss tokens get 0 and
    are not counted. `token_mean`: 1 / all tokens. `seq_mean_token_mean`: 1 / (rows · own tokens).
    `seq_mean_token_sum`: 1 / (rows · divisor), with a constant divisor such as max_new_tokens
    (Dr.GRPO, arXiv 2503.20783).

    Raises:
        UserError: `seq_mean_token_sum` without a positive divisor.
    """
    rows = sum(n > 0 for n in lengths)
    if kind == "token_mean":
        total = sum(lengths)
        return [1.0 / total if n > 0 else 0.0 for n in lengths]
    if kind == "seq_mean_token_mean":
        return [1.0 / (rows * n) if n > 0 else 0.0 for n in lengths]
    if divisor is None or divisor <= 0:
        raise UserError("seq_mean_token_sum needs a divisor above 0 (max_new_tokens).")
    return [1.0 / (rows * divisor) if n > 0 else 0.0 for n in lengths]
