"""The check of `llm_server.embedded.batch_invariant`.

Libraries for products of matrices choose a kernel by the number of rows, and kernels add the terms
of a sum in different orders. The option chooses products and passes whose numbers do not depend on
other requests. Whether they really do not, depends on the processor.
"""

import torch

from arealite.base.errors import UserError
from arealite.ext.embedded.decoder import BaseDecoder
from arealite.ext.embedded.generation import Generation, SamplingParams

PROBE_COUNTS = 2, 7, 64
"""Numbers of requests in a batch that are compared with one."""
PROBE_TOKENS = 4
"""Tokens of each request."""


def check_batch_invariant(decoder: BaseDecoder) -> None:
    """Check that a request gets the same log-probabilities alone and beside others.

    Raises:
        UserError: It does not.
    """
    alone = _first_logprobs(decoder, 1)
    for count in PROBE_COUNTS:
        beside = _first_logprobs(decoder, count)
        difference = max(abs(left - right) for left, right in zip(alone, beside, strict=True))
        if difference:
            raise UserError(
                "llm_server.embedded.batch_invariant=true: on this processor, log-probabilities of "
                f"a request alone and among {count} differ by {difference:.2g}. Set it to false."
            )


def _first_logprobs(decoder: BaseDecoder, count: int) -> list[float]:
    """Return the log-probabilities of the first of several requests, which run together."""
    generator = torch.Generator().manual_seed(0)
    vocab_size: int = decoder.model.config.get_text_config().vocab_size
    generations = [
        Generation(
            rid="",
            prompt=torch.randint(vocab_size, (5 + number % 40,), generator=generator).tolist(),
            sampling=SamplingParams(sampling_seed=number),
            limit=PROBE_TOKENS,
            stops=frozenset(),
        )
        for number in range(count)
    ]
    decoder.run(generations)
    return generations[0].logprobs
